"""Lying peers against a run in local mode: peers outside the run achieve nothing, and members no more than is
documented."""

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
import trio
from blake3 import blake3

from crypto.encoding import encode
from crypto.identity import Identity, PeerId
from node.averaging.signature import run_key, signature_of
from node.averaging_events import AveragingEnded, AveragingJoined
from node.checkpoints.weights import weights_name
from node.errors import Unreachable
from node.events import Event, RunEnded, StepCommitted
from node.local.service import LocalRuns
from node.protocols.calls import ask
from node.protocols.runs import Join
from node.seams import Parts
from partition.run import conclusions as core
from partition.run.admission import Present
from partition.run.conclusions import Conclusion, ModelEvaluated, Said, Sends, Told
from partition.run.ending import Ending
from partition.run.local_settings import LocalSettings
from partition.run.tickets import make_ticket
from sim.worlds.scheduling import run_virtually
from tests import stack
from tests.local_runs import local_runs
from tests.node.local.test_runs import QUICK, SLOW, ends, train
from tests.stack import Swarm, swarm

STEPS = 24


class _Without:
    """Wraps a node's service so that some peers offer nothing."""

    def __init__(self, service: Any, peers: set[PeerId]) -> None:
        self._service = service
        self._peers = peers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)

    def offers(self) -> list[Any]:
        return [each for each in self._service.offers() if each.peer not in self._peers]


def run_of(group: Swarm) -> Any:
    (member,) = local_runs(group.nodes["a"]).members.values()
    return member.run


def test_a_peer_outside_the_run_takes_no_part() -> None:
    """The outside peer knows the run. It announces a state of more steps, and claims evaluations and a
    settled end."""

    strangers: set[PeerId] = set()

    def make(service: Any, archive: Any) -> LocalRuns:
        without: Any = _Without(service, strangers)
        return LocalRuns(without, archive)

    async def play() -> None:
        # The outside peer has a free slot but is not asked, so it is not in this run.
        parts: dict[str, Parts] = {name: {LocalRuns: make} for name in "ab"}
        async with (
            swarm("abx", stage_seconds=SLOW, preset="lan", parts_of=parts) as group,
            trio.open_nursery() as nursery,
        ):
            liar, seen = group.nodes["x"], [False]
            strangers.add(liar.peer)

            async def lie(event: Event) -> None:
                if not isinstance(event, AveragingEnded) or seen[0]:
                    return
                seen[0] = True
                run = run_of(group)
                signature = signature_of(f"run in local mode {run.id.hex()}", ())
                part = liar.averaging.open(f"run:{run.text}", signature)
                part.tell(step=STEPS, samples=10**6, rounds=99, lineage=run.id, has_state=True)
                liar.seams.storage.write(weights_name(run.text), b"a lie")
                lied = Conclusion(run.id, "done", "", STEPS, blake3(b"a lie").hexdigest(), liar.peer)
                chain = (make_ticket(liar.signer, run.id, liar.peer, 0.0),)
                nursery.start_soon(average, part, liar)
                for name in "ab":
                    for message in (
                        Present(run.id, chain, asks=True),
                        ModelEvaluated(run.id, STEPS - 1, 1, -1e9, (), -1e9, 99),
                        Said(run.id, lied, holds=True, is_settled=True),
                    ):
                        liar.network.send(group.nodes[name].peer, core.PROTOCOL, encode(message))

            await train(group, QUICK, lie, steps=STEPS)
            found = await ends(group, "ab")
            assert seen[0]
            assert {event.outcome for event in found} == {"done"}
            assert len({event.weights for event in found}) == 1
            assert found[0].weights != blake3(b"a lie").hexdigest()
            own = [each for name in "ab" for each in group.events[name] if isinstance(each, StepCommitted)]
            assert max(each.step for each in own) == STEPS - 1
            for name in "ab":
                averaged = {
                    peer
                    for each in group.events[name]
                    if isinstance(each, AveragingEnded)
                    for peer in each.averaged
                }
                joined = {each.peer for each in group.events[name] if isinstance(each, AveragingJoined)}
                assert liar.peer not in averaged | joined
            assert [each for each in group.events["x"] if isinstance(each, AveragingEnded)], (
                "the outside peer did not even try to average"
            )
            nursery.cancel_scope.cancel()

    async def average(part: Any, liar: Any) -> None:
        from node.averaging.rounds import RoundWish

        del liar
        while True:
            await part.average(np.zeros(3_000, np.float32), 1e9, RoundWish(patience_seconds=5.0))

    run_virtually(play)


def test_a_peer_outside_the_run_gets_no_state() -> None:
    async def play() -> None:
        async with swarm("abx", stage_seconds=SLOW, preset="lan") as group:
            refused: list[str] = []

            async def fetch(event: Event) -> None:
                if not isinstance(event, AveragingEnded) or refused:
                    return
                run, node = run_of(group), group.nodes["b"].averaging
                signature = signature_of(f"run in local mode {run.id.hex()}", ())
                stranger = Identity(bytes([9]) * 32).peer
                found = await node._snap(stranger, run_key(f"run:{run.text}"), signature, 0)
                refused.append(str(found))

            await train(group, QUICK, fetch, steps=8)
            assert "does not take part" in refused[0]

    run_virtually(play)


@pytest.mark.parametrize("kind", ["own", "old", "again"])
def test_join_requests_that_are_expired_or_from_outside_are_refused(kind: str) -> None:
    async def play() -> None:
        async with swarm("abx", stage_seconds=SLOW, preset="lan") as group:
            a, x = group.nodes["a"], group.nodes["x"]
            wanted = stack.manifest(
                stages=1, microbatch=16, microbatches=2, dtype="float32", local=QUICK, steps=4
            )
            run = stack.prepare(a, wanted)
            wall = a.seams.clock.wall()
            asker = x if kind == "own" else a
            ticket = make_ticket(
                asker.signer, run.id, group.nodes["b"].peer, wall - (3_600.0 if kind == "old" else 0.0)
            )
            join = Join(run.fact, (ticket,))
            if kind == "again":
                await ask(a.network, group.nodes["b"].peer, join, seconds=20)
                member = local_runs(group.nodes["b"]).members[run.id]
                await local_runs(group.nodes["b"]).end(member, "failed", "", "")
            before = len(local_runs(group.nodes["b"]).members)
            with pytest.raises(Unreachable):
                await ask(asker.network, group.nodes["b"].peer, join, seconds=20)
            assert len(local_runs(group.nodes["b"]).members) == before == 0

    run_virtually(play)


async def lie_with(
    kind: str, local: LocalSettings, tell: Callable[[Any, Any], Awaitable[None]], steps: int = STEPS
) -> tuple[list[RunEnded], dict[str, list[Event]], str]:
    """Play a run of three members, of which the last lies once it has averaged. Return the ends of the two
    honest members.
    """
    del kind
    async with swarm("abc", stage_seconds=SLOW) as group:
        told: list[str] = []

        async def lie(event: Event) -> None:
            if isinstance(event, AveragingEnded) and not told:
                members = local_runs(group.nodes["c"]).members
                if members:
                    (member,) = members.values()
                    told.append("x")
                    await tell(group.nodes["c"], member)

        await train(group, local, lie, steps=steps)
        assert told
        found = await ends(group, "ab")
        return found, group.events, told[0]


class _Liar(Ending):
    """Answer every message with the claim that the run is settled by its own false result."""

    def __init__(self, me: PeerId, run: bytes, settings: LocalSettings, lie: Said) -> None:
        super().__init__(me, run, settings)
        self.lie = lie

    @property
    def said(self) -> Said:
        return self.lie

    @property
    def best(self) -> Conclusion:
        return self.lie.conclusion

    @property
    def holds(self) -> bool:
        return True

    def receive(self, now: float, sender: PeerId, message: Told) -> Sends:
        return [(sender, self.lie)]

    def wake(self, now: float) -> Sends:
        return []


def test_a_junk_result_that_claims_to_be_settled_ends_nothing() -> None:
    async def play() -> None:
        lied: list[str] = []

        async def tell(node: Any, member: Any) -> None:
            run = member.run
            storage = node.seams.storage
            data = await member._trainer.export()
            from node.checkpoints.weights import join_stages

            data = join_stages(run, member._graph, [data])
            junk = bytearray(data)
            size = 8 + int.from_bytes(data[:8], "little")
            floats = np.frombuffer(junk, np.uint8)[size:]
            floats[: len(floats) // 4 * 4].view(np.float32)[:] = 0.3
            storage.write(weights_name(run.text), bytes(junk))
            lied.append(blake3(bytes(junk)).hexdigest())
            said = Conclusion(run.id, "done", "", STEPS, lied[0], node.peer)
            liar = member.ending = _Liar(node.peer, run.id, QUICK, Said(run.id, said, True, True, True))
            local_runs(node)._endings.open(0.0, liar, member.admission)
            for peer in member.crew.others:
                node.network.send(peer, core.PROTOCOL, encode(liar.said))

        found, events, _ = await lie_with("junk", QUICK, tell)
        assert {event.outcome for event in found} == {"done"}
        assert len({event.weights for event in found}) == 1
        assert found[0].weights not in lied
        steps = [each.step for name in "ab" for each in events[name] if isinstance(each, StepCommitted)]
        assert max(steps) == STEPS - 1, "the honest members stopped early"

    run_virtually(play)
