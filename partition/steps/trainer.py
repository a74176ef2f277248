"""The trainer's side of exact mode: it feeds numbered micro-batches and names what a step is.

Step t is the set of micro-batches [tK, (t+1)K). It is committed in two rounds, so that a death at
any moment leaves every stage either before or after the step, never between its replicas:

    syncing -> counting -> committing -> applying -> counting (next step) ... -> evaluating -> done
                  ^            |             |
                  +--- drop ---+             +--- a drop here costs nothing: every total is ready

A drop while counting or committing moves only the dead replica's micro-batches to the others of its
stage, from kept frames; a stage without a replica left ends the run (`failed`).
"""

from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, Literal

import msgspec

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId, short_peer
from partition.plan.plan import Plan, plan_hash
from partition.plan.schedule import Routes
from partition.steps.messages import (
    EVALUATIONS_IN_FLIGHT_MAX,
    SAMPLES_MAX,
    Applied,
    Apply,
    Counted,
    Drop,
    Evaluated,
    Failed,
    Reduced,
    Sends,
    StageCommit,
    StepCommit,
    StepMessage,
    Sync,
    Synced,
)

ATTEMPTS_PER_PLAN = 2**20
"""Attempts are numbered on from plan to plan, so that no total of an older plan is taken for a newer one."""

Phase = Literal["syncing", "counting", "committing", "applying", "evaluating", "done", "failed"]


@dataclass(frozen=True)
class FeedReady:
    """Send this micro-batch's inputs and labels; None for a half its receiver has already."""

    step: int
    microbatch: int
    train: bool
    input_to: PeerId | None
    labels_to: PeerId | None


@dataclass(frozen=True)
class StepApplied:
    """A step is final on every live replica. `loss` is the mean over its samples."""

    step: int
    loss: float
    samples: int
    replicas: int


@dataclass(frozen=True)
class ReplicaLost:
    """A replica is out; `replayed` micro-batches of the open step went to the others of its stage."""

    step: int
    stage: int
    peer: PeerId
    replayed: int


@dataclass(frozen=True)
class TrainingEvaluated:
    """The held-out samples have all been through: sums over them."""

    samples: int
    loss: float
    metrics: tuple[float, ...]


@dataclass(frozen=True)
class TrainingFailed:
    """The run cannot go on, and why."""

    reason: str


class Trainer:
    """Feeds one run under one plan, from whatever step its replicas have reached."""

    deadline = inf

    def __init__(self, me: PeerId, plan: Plan, *, steps: int, evaluations: int, metrics: int = 0) -> None:
        """`metrics` is how many numbers beside the loss the model has."""
        self.me = me
        self.plan = plan
        self.plan_hash = plan_hash(plan)
        self.steps = steps
        self.evaluations = evaluations
        self.metrics = metrics
        self.events: list[Any] = []
        self.phase: Phase = "syncing"
        self.step = 0
        self.attempt = plan.height * ATTEMPTS_PER_PLAN
        self.dropped: tuple[PeerId, ...] = ()
        self._routes = Routes(plan, ())
        self._last = len(plan.stages) - 1
        self._synced: dict[PeerId, Synced] = {}
        self._counted: dict[tuple[int, int], PeerId] = {}
        self._losses: dict[int, Counted] = {}
        self._reduced: dict[PeerId, Reduced] = {}
        self._applied: dict[PeerId, bytes] = {}
        self._evaluated: dict[int, Evaluated] = {}
        self._evaluations_fed = 0
        self._evaluations_awaited = 0
        self._failures: dict[PeerId, str] = {}
        self._commit: StepCommit | None = None
        self._apply: Apply | None = None

    def start(self, now: float) -> Sends:  # noqa: ARG002 - the shape of a core
        """Ask every replica where it is. Who is known to be dead may be dropped before."""
        return self._to_all(self._drop_message())

    @property
    def live(self) -> tuple[PeerId, ...]:
        """The replicas still in, stage by stage."""
        return tuple(peer for _, peer in self._live_rows())

    def receive(self, now: float, sender: PeerId, message: Any) -> Sends:
        """A step message from a replica."""
        if not isinstance(message, StepMessage) or message.plan != self.plan_hash:
            return []
        stage = self.plan.stage_of(sender)
        if stage is None:
            raise RemoteProtocolError("a step message from a peer without a stage")
        if sender in self.dropped or self.phase in ("done", "failed"):
            return []
        match message:
            case Synced():
                return self._on_synced(sender, message)
            case Counted():
                return self._on_counted(sender, stage, message)
            case Reduced():
                return self._on_reduced(sender, message)
            case Applied():
                return self._on_applied(sender, message)
            case Evaluated():
                return self._on_evaluated(sender, stage, message)
            case Failed():
                self._failures[sender] = message.reason
                return self.drop(now, sender)
        raise RemoteProtocolError(f"a {type(message).__name__} is not for a trainer")

    def wake(self, now: float) -> Sends:  # noqa: ARG002 - the shape of a core
        """Nothing here is timed: SWIM decides who is gone."""
        return []

    def drop(self, now: float, peer: PeerId) -> Sends:  # noqa: ARG002
        """A replica was declared dead, left or failed: go on without it, if its stage can."""
        stage = self.plan.stage_of(peer)
        if stage is None or peer in self.dropped or self.phase in ("done", "failed"):
            return []
        orphans = [number for number in self._open_ids() if self._routes.owner(stage, number) == peer]
        self.dropped = (*self.dropped, peer)
        self._routes = Routes(self.plan, self.dropped)
        if not self._routes.live(stage):
            return self._fail(
                f"stage {stage + 1} of {self._last + 1} lost its last replica {short_peer(peer)} "
                f"after {self.step} committed steps; its parameters are gone"
                + (f" ({self._failures[peer]})" if peer in self._failures else "")
            )
        self.events.append(ReplicaLost(self.step, stage, peer, len(orphans)))
        message = self._drop_message()
        # The dropped is told too: it may live, and then its memory is wanted elsewhere.
        sends = [*self._to_all(message), (peer, message)]
        return sends + self._go_on_without(stage, orphans)

    def reconnected(self, peer: PeerId) -> Sends:
        """The stream to `peer` broke and is open again: say again what it may have missed.

        Inputs and labels are the shell's to send again: `FeedReady` events name them.
        """
        if self.plan.stage_of(peer) is None or self.phase in ("done", "failed"):
            return []
        sends: Sends = [(peer, self._drop_message())] if self.dropped or self.phase == "syncing" else []
        if peer in self.dropped:
            return sends
        if self.phase in ("counting", "evaluating"):
            for microbatch in self._open_ids():
                self._feed(microbatch, train=self.phase == "counting", only_to=peer)
        elif self.phase == "committing" and self._commit is not None:
            sends.append((peer, self._commit))
        elif self.phase == "applying" and self._apply is not None:
            sends.append((peer, self._apply))
        return sends

    # Phases

    def _on_synced(self, sender: PeerId, message: Synced) -> Sends:
        if (message.applied.step if message.applied else -1) != message.step - 1:
            raise RemoteProtocolError("steps applied that its last Apply does not fit")
        if self.phase != "syncing":
            return []
        self._synced[sender] = message
        return self._when_synced()

    def _when_synced(self) -> Sends:
        if any(peer not in self._synced for peer in self.live):
            return []
        self.step, apply = self._resume_point()
        for peer in self.live:
            if not _can_resume(self._synced[peer], self.step, apply):
                # It holds no total of the step the others have applied, so it has nothing to go on from.
                return self.drop(0.0, peer)
        behind = [peer for peer in self.live if self._synced[peer].step < self.step]
        if not behind:
            return self._open_step()
        assert apply is not None
        # Finish the step that the trainer before left half applied, then go on.
        self.step, self.phase = self.step - 1, "applying"
        self._applied = {peer: b"" for peer in self.live if peer not in behind}
        self._apply = msgspec.structs.replace(apply, plan=self.plan_hash, step=self.step)
        return [(peer, self._apply) for peer in behind]

    def _resume_point(self) -> tuple[int, Apply | None]:
        """The most steps that every stage has, or can have, applied, and the last one's Apply.

        The newest step alone would let one replica that lies, or was lost and came back, end the run.
        """
        claims = [(self._synced[peer].step, self._synced[peer].applied) for peer in self.live]
        claims.sort(key=lambda claim: (claim[0], claim[1].attempt if claim[1] else 0), reverse=True)
        for step, apply in claims:
            reached = {
                stage for stage, peer in self._live_rows() if _can_resume(self._synced[peer], step, apply)
            }
            if len(reached) == len(self.plan.stages):
                return step, apply
        return claims[0]

    def _open_step(self) -> Sends:
        self._counted.clear()
        self._losses.clear()
        self._commit = self._apply = None
        self.attempt = self.plan.height * ATTEMPTS_PER_PLAN
        if self.step >= self.steps:
            self.phase = "evaluating"
            return self._when_evaluated()
        self.phase = "counting"
        for microbatch in self._step_ids():
            self._feed(microbatch, train=True)
        return []

    def _on_counted(self, sender: PeerId, stage: int, message: Counted) -> Sends:
        if self.phase != "counting" or message.step != self.step or message.stage != stage:
            return []
        if message.microbatch not in self._step_ids():
            raise RemoteProtocolError("a micro-batch was counted that is not in the step")
        if message.samples > SAMPLES_MAX:
            raise RemoteProtocolError("a loss of an impossible number of samples")
        if self._routes.owner(stage, message.microbatch) != sender:
            return []
        if not isfinite(message.loss):
            return self._fail(_diverged(f"step {self.step}: the loss"))
        self._counted[stage, message.microbatch] = sender
        if stage == self._last:
            self._losses[message.microbatch] = message
        return self._when_counted()

    def _when_counted(self) -> Sends:
        if len(self._counted) < len(self.plan.stages) * self.plan.microbatches:
            return []
        rows = tuple(
            StageCommit(stage, peer, tuple(self._owned(stage, peer))) for stage, peer in self._live_rows()
        )
        self.phase = "committing"
        self._reduced.clear()
        self._commit = StepCommit(plan=self.plan_hash, step=self.step, attempt=self.attempt, replicas=rows)
        return self._to_all(self._commit)

    def _on_reduced(self, sender: PeerId, message: Reduced) -> Sends:
        if (self.phase, message.step, message.attempt) != ("committing", self.step, self.attempt):
            return []
        self._reduced[sender] = message
        if any(peer not in self._reduced for peer in self.live):
            return []
        digests = {peer: row.digest for peer, row in self._reduced.items()}
        if (liar := self._disagreement(digests)) is not None:
            return self._fail(f"step {self.step}: the replicas of stage {liar + 1} hold different totals")
        squared_norm = self._squared_norm()
        if squared_norm is not None and not isfinite(squared_norm):
            return self._fail(_diverged(f"step {self.step}: the gradient's norm"))
        self.phase = "applying"
        self._applied.clear()
        samples = sum(row.samples for row in self._losses.values())
        self._apply = Apply(
            plan=self.plan_hash,
            step=self.step,
            attempt=self.attempt,
            samples=max(1, samples),
            squared_norm=squared_norm,
        )
        return self._to_all(self._apply)

    def _squared_norm(self) -> float | None:
        """Of all stages' totals, by the first replica of each; None where nobody says one.

        Equal totals may have norms that differ in the last bit from machine to machine; by taking one for
        all, all scale by the same number.
        """
        norms: list[float] = []
        for index in range(len(self.plan.stages)):
            first = next(peer for stage, peer in self._live_rows() if stage == index)
            norm = self._reduced[first].squared_norm
            if norm is not None:
                norms.append(norm)
        return sum(norms) if norms else None

    def _on_applied(self, sender: PeerId, message: Applied) -> Sends:
        if self.phase != "applying" or message.step != self.step:
            return []
        self._applied[sender] = message.digest
        return self._when_applied()

    def _when_applied(self) -> Sends:
        if any(peer not in self._applied for peer in self.live):
            return []
        if (liar := self._disagreement(self._applied)) is not None:
            return self._fail(f"step {self.step}: the replicas of stage {liar + 1} hold different parameters")
        if self._losses:
            samples = max(1, sum(row.samples for row in self._losses.values()))
            loss = sum(self._losses[number].loss for number in sorted(self._losses)) / samples
            self.events.append(StepApplied(self.step, loss, samples, len(self.live)))
        self.step += 1
        return self._open_step()

    def _on_evaluated(self, sender: PeerId, stage: int, message: Evaluated) -> Sends:
        if self.phase != "evaluating" or stage != self._last:
            return []
        if message.microbatch >= self._evaluations_fed:
            raise RemoteProtocolError("an evaluation that was not asked for")
        if len(message.metrics) != self.metrics or message.samples > SAMPLES_MAX:
            raise RemoteProtocolError("an evaluation with impossible numbers")
        if self._routes.owner(stage, message.microbatch) == sender:
            if not message.is_finite:
                return self._fail(_diverged("held out: the loss or a metric"))
            self._evaluated.setdefault(message.microbatch, message)
        return self._when_evaluated()

    def _when_evaluated(self) -> Sends:
        if len(self._evaluated) == self.evaluations:
            rows = [self._evaluated[number] for number in sorted(self._evaluated)]
            self.phase = "done"
            self.events.append(
                TrainingEvaluated(
                    sum(row.samples for row in rows),
                    sum(row.loss for row in rows),
                    tuple(sum(row.metrics[place] for row in rows) for place in range(self.metrics)),
                )
            )
            return []
        while self._evaluations_awaited in self._evaluated:
            self._evaluations_awaited += 1
        limit = min(self.evaluations, self._evaluations_awaited + EVALUATIONS_IN_FLIGHT_MAX)
        while self._evaluations_fed < limit:
            self._feed(self._evaluations_fed, train=False)
            self._evaluations_fed += 1
        return []

    # Deaths

    def _go_on_without(self, stage: int, orphans: list[int]) -> Sends:
        match self.phase:
            case "syncing":
                return self._when_synced()
            case "counting" | "committing":
                if self.phase == "committing":
                    self.phase, self.attempt = "counting", self.attempt + 1
                for microbatch in orphans:
                    self._counted.pop((stage, microbatch), None)
                    self._feed(microbatch, train=True, only_stage=stage)
                return self._when_counted()
            case "applying":
                return self._when_applied()
            case "evaluating":
                for microbatch in orphans:
                    self._feed(microbatch, train=False, only_stage=stage)
        return []

    def _fail(self, reason: str) -> Sends:
        self.phase = "failed"
        self.events.append(TrainingFailed(reason))
        return []

    # Bookkeeping

    def _feed(
        self, microbatch: int, *, train: bool, only_stage: int | None = None, only_to: PeerId | None = None
    ) -> None:
        first, last = self._routes.owner(0, microbatch), self._routes.owner(self._last, microbatch)
        to_first = only_stage in (None, 0) and only_to in (None, first)
        to_last = only_stage in (None, self._last) and only_to in (None, last)
        if to_first or to_last:
            self.events.append(
                FeedReady(
                    self.step, microbatch, train, first if to_first else None, last if to_last else None
                )
            )

    def _step_ids(self) -> range:
        return range(self.step * self.plan.microbatches, (self.step + 1) * self.plan.microbatches)

    def _open_ids(self) -> list[int]:
        """The micro-batches under way: of the open step, or held out."""
        if self.phase == "evaluating":
            fed = range(self._evaluations_awaited, self._evaluations_fed)
            return [number for number in fed if number not in self._evaluated]
        return list(self._step_ids()) if self.phase in ("counting", "committing") else []

    def _owned(self, stage: int, peer: PeerId) -> list[int]:
        return [number for number in self._step_ids() if self._routes.owner(stage, number) == peer]

    def _live_rows(self) -> list[tuple[int, PeerId]]:
        return [
            (index, PeerId(peer))
            for index, stage in enumerate(self.plan.stages)
            for peer in stage.replicas
            if peer not in self.dropped
        ]

    def _disagreement(self, digests: dict[PeerId, bytes]) -> int | None:
        """The first stage whose live replicas do not hold the same bytes."""
        for index, stage in enumerate(self.plan.stages):
            known = {digests[PeerId(p)] for p in stage.replicas if p not in self.dropped} - {b""}
            if len(known) > 1:
                return index
        return None

    def _drop_message(self) -> Drop | Sync:
        if self.phase == "syncing":  # which step is open is not known yet, so none may be voided
            return Sync(plan=self.plan_hash, dropped=self.dropped)
        counting = self.step + 1 if self.phase == "applying" else self.step
        return Drop(plan=self.plan_hash, step=counting, dropped=self.dropped)

    def _to_all(self, message: StepMessage) -> Sends:
        return [(peer, message) for peer in self.live]


def _diverged(what: str) -> str:
    return f"{what} is no finite number any more; a lower train.learning_rate, or train.clip_norm, may help"


def _can_resume(synced: Synced, step: int, apply: Apply | None) -> bool:
    """Whether a replica has applied these `step` steps, the last by `apply`, or holds the total to do so."""
    if synced.step == step:
        return (synced.applied and synced.applied.attempt) == (apply and apply.attempt)
    return synced.step == step - 1 and apply is not None and synced.reduced == apply.attempt
