"""The step from which a run continues under a new plan, computed from the replicas' Synced messages."""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import isfinite

from msgspec.structs import replace

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.plan import NO_HASH, Plan, plan_hash
from partition.steps.messages import SAMPLES_MAX, Apply, Fill, Synced
from partition.steps.routes import step_numbers


@dataclass(frozen=True)
class Lacking:
    """No replica of `stage` has a state with which the others could continue; `reason` is for display."""

    stage: int
    reason: str


def is_begun(plan: Plan, step: int, rows: Collection[Synced]) -> bool:
    """Return whether the step after `step` steps was opened under an earlier plan: some of these replicas
    have begun or counted micro-batches of it."""
    numbers = step_numbers(plan, step)
    held = (number for row in rows if row.step == step for number in (*row.counted, *row.begun))
    return any(number in numbers for number in held)


def check_synced(plan: Plan, message: Synced) -> None:
    """Check that a Synced is consistent, in itself and with the plan. Raises RemoteProtocolError if not."""
    step = message.step
    if plan.restored != NO_HASH and step is not None and step < plan.step:
        raise RemoteProtocolError("a replica reports fewer steps than the checkpoint that the plan restores")
    if message.applied is not None and message.applied.step + 1 != step:
        raise RemoteProtocolError("a replica reports steps that do not follow from its latest Apply")
    if message.applied is not None and not isfinite(message.applied.loss):
        raise RemoteProtocolError("a replica reports an applied step whose loss is not finite")
    series = None if message.applied is None else message.applied.validated
    if series is not None and not (isfinite(series.best) and series.best_step <= series.step <= (step or 0)):
        raise RemoteProtocolError("a replica reports validations that do not fit its applied steps")
    numbers = range(0) if step is None else step_numbers(plan, step)
    named = (*message.counted, *message.begun)
    if len(set(named)) != len(named) or any(number not in numbers for number in named):
        raise RemoteProtocolError("a replica reports a micro-batch outside of the open step, or twice")
    if not len(message.counted) == len(message.samples) == len(message.losses):
        raise RemoteProtocolError("a replica reports micro-batches without their losses")
    if any(samples > SAMPLES_MAX for samples in message.samples):
        raise RemoteProtocolError("a loss has an impossible number of samples")


def can_resume(synced: Synced, step: int, apply: Apply | None) -> bool:
    """Return whether a replica has applied these `step` steps, the last one by `apply`, or can do so because
    it has the total or the step is skipped."""
    if synced.step == step:
        return (synced.applied and synced.applied.attempt) == (apply and apply.attempt)
    if synced.step != step - 1 or apply is None:
        return False
    return apply.skipped > 0 or synced.reduced == apply.attempt


def resume_point(plan: Plan, synced: Mapping[PeerId, Synced]) -> tuple[int, Apply | None] | Lacking:
    """Return the maximum number of steps that every stage has applied or can apply, and the Apply of the last
    one; or the stage that lacks a state.

    The newest claimed step alone does not count. Otherwise one replica that lies, or that was lost and has
    returned, could end the run.
    """
    claims = [(row.step, row.applied) for row in synced.values() if row.step is not None]
    if plan.restored != NO_HASH:
        claims = [claim for claim in claims if claim[0] == plan.step]
    claims.sort(key=lambda claim: (claim[0], claim[1].attempt if claim[1] else 0), reverse=True)
    lacking = 0
    for step, apply in claims:
        missing = [
            number
            for number, stage in enumerate(plan.stages)
            if not any(can_resume(synced[PeerId(peer)], step, apply) for peer in stage.replicas)
        ]
        if not missing:
            return step, apply
        lacking = lacking or 1 + missing[0]
    newest = f", so nothing can follow the {claims[0][0]} steps that others have committed" if claims else ""
    stage = max(0, lacking - 1)
    reason = f"no replica of stage {stage + 1} of {len(plan.stages)} holds its parameters{newest}"
    return Lacking(stage, reason)


def minority(plan: Plan, digests: Mapping[PeerId, bytes]) -> list[PeerId]:
    """Return the replicas whose digest differs from that of most of their stage. In a tie, the first in the
    plan is right."""
    wrong = []
    for stage in plan.stages:
        said = [(PeerId(peer), digests[PeerId(peer)]) for peer in stage.replicas if PeerId(peer) in digests]
        if said:
            # Counter keeps the plan's order among equal counts.
            right = Counter(digest for _, digest in said).most_common(1)[0][0]
            wrong += [peer for peer, digest in said if digest != right]
    return wrong


def fills(plan: Plan, step: int, right: Mapping[PeerId, bytes], apply: Apply | None) -> dict[PeerId, Fill]:
    """Return the Fill for each replica that is not in `right`. `right` has the replicas that hold their
    stage's state after `step` steps, with their digests, NO_HASH if unknown; `apply` is their latest
    Apply."""
    name = plan_hash(plan)
    applied = None if apply is None else replace(apply, plan=name)
    found: dict[PeerId, Fill] = {}
    for stage in plan.stages:
        peers = [PeerId(peer) for peer in stage.replicas]
        sources = tuple(peer for peer in peers if peer in right)
        digest = next((right[peer] for peer in sources if right[peer] != NO_HASH), NO_HASH)
        for peer in peers:
            if peer not in right:
                found[peer] = Fill(plan=name, step=step, digest=digest, sources=sources, applied=applied)
    return found


def is_filled(fill: Fill, message: Synced) -> bool:
    """Return whether a Synced shows that the filling is done."""
    same_apply = (message.applied and message.applied.attempt) == (fill.applied and fill.applied.attempt)
    return message.step == fill.step and same_apply and fill.digest in (NO_HASH, message.digest)
