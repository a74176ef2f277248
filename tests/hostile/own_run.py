"""Runs that the hostile peer itself requests: with a lease and a Start it makes an idle node a member of such
a run.

Manifest and plan fit each other, so a victim takes part; everything else in them is as hostile as possible.
The hostile peer is requester, trainer and committer, so its messages pass every check of their sender.
"""

from crypto.encoding import encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Signer
from crypto.identity import PeerId
from node.protocols import runs as wire
from node.protocols.manifest import MANIFEST_PURPOSE, Manifest, Run, check_run
from partition.plan.history import first_history
from partition.plan.plan import MICROBATCHES_MAX, NO_HASH, Plan, StagePlan, encode_plan, plan_hash
from partition.run.asks import Done
from tests.hostile.insider import Insider
from tests.hostile.known import Known
from tests.hostile.values import Values
from tests.hostile.wire import PROTOCOLS, structs

TRIES_MAX = 20
"""Maximum number of manifests generated until one is well-formed."""
WORDS = 3
"""Number of conversations that the peer has as the committer of such a run."""

RUNS = next(protocol for protocol in PROTOCOLS if protocol.name == wire.RUNS_PROTOCOL)
PIPELINE = next(protocol for protocol in PROTOCOLS if protocol.name == wire.PIPELINE_PROTOCOL)


def hostile_run(values: Values, signer: Signer) -> Run | None:
    """Return a run signed by the hostile peer; None if no manifest has been received yet."""
    for _ in range(TRIES_MAX):
        if values.known.specimen(Manifest, values.rng) is None:
            return None
        try:
            return check_run(signer, signer.sign(MANIFEST_PURPOSE, encode(values.like(Manifest))))
        except RemoteProtocolError:
            continue
    return None


def hostile_plan(values: Values, run: Run, me: PeerId, victim: PeerId) -> Plan | None:
    """Return a plan that puts the whole model on the victim, with the layers of a plan that was received;
    None if there is none."""
    known = values.known.specimen(Plan, values.rng)
    if not isinstance(known, Plan):
        return None
    rate = values.of(int, "rates")
    stage = StagePlan(0, known.stages[-1].last_layer, (victim,), (min(max(rate, 0), 2**63 - 1),))
    roster = tuple(sorted({me, victim}))
    microbatches = min(run.manifest.microbatches, MICROBATCHES_MAX)
    return Plan(run.id, NO_HASH, 0, roster, (me,), microbatches, (stage,))


async def take_in(insider: Insider, values: Values, signer: Signer, victim: PeerId) -> bool:
    """Make an idle victim a member, send it everything as its committer, and end the run. Return whether the
    victim became a member. Raises StreamClosed, Unreachable."""
    run = hostile_run(values, signer)
    plan = hostile_plan(values, run, signer.peer, victim) if run is not None else None
    if run is None or plan is None:
        return False
    data = encode_plan(plan)
    leased = await insider.put(victim, RUNS, encode(wire.LeaseRequest(run.fact, data, 0)))
    insider.sent[f"(own run: {type(leased).__name__.lower()})"] += 1
    if not isinstance(leased, wire.Leased):
        return False
    values.known.learn(run.id, "run")
    values.known.learn(plan_hash(plan), "plan")
    begun = await insider.put(victim, RUNS, encode(wire.Start(run.fact, data, first_history(signer, plan))))
    insider.sent[f"(own run: start {type(begun).__name__.lower()})"] += 1
    kinds = structs(PIPELINE.said)
    for _ in range(WORDS):
        fixed = {
            "plan": plan_hash(plan),
            "key": plan_hash(plan) + bytes(8),
            "run": run.id,
            "parent": plan_hash(plan),
        }
        await insider.converse(victim, PIPELINE, values.rng.sample(kinds, len(kinds)), **fixed)
    for kind in values.rng.sample(structs(RUNS.said), len(structs(RUNS.said))):
        if kind is not wire.End:
            await insider.put(victim, RUNS, values.message(kind, RUNS.name, plan=plan_hash(plan), run=run.id))
    end = values.message(wire.End, RUNS.name, plan=plan_hash(plan))
    await insider.put(victim, RUNS, end)
    # If that did not end the run, free the victim's slot with a valid End.
    await insider.put(victim, RUNS, encode(wire.End(plan_hash(plan), "failed", "enough", "")))
    return isinstance(begun, Done)


def learn_run(known: Known, run: Run, plan: Plan | None) -> None:
    """Learn the public data of a run, and of requests in its name."""
    known.learn(run)
    known.learn(run.id, "run")
    known.learn(run.text, "run")
    if plan is not None:
        known.learn(plan)
        for name in ("plan", "parent"):
            known.learn(plan_hash(plan), name)
        known.learn(wire.LeaseRequest(run.fact, encode_plan(plan), 0))
