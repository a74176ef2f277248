"""Members that stall, or that enter groups and then send nothing, among honest members. Whole nodes in
virtual time."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import trio

from gossip.averaging.outcome import NotAveraged, Reason
from node.averaging.participation import Participation
from node.averaging.rounds import RoundWish
from node.averaging.runner import Runner
from node.seams import Parts
from sim.executor import SimExecutor
from sim.worlds.scheduling import run_virtually
from tests.stack import swarm

SIGNATURE = bytes([7]) * 32
ROUND_SECONDS = 0.4
SMALL, LARGE = 64, 16_384
"""Lengths of two vectors: one member reduces the small vector alone, and all members share the reduction of
the large one."""
STALL_SECONDS = 6.0
APART_SECONDS = 9.0
"""Maximum gap between rounds that a stall of STALL_SECONDS may cause. It was once 21 to 46 s."""
GAP_SECONDS = 15.0
"""Maximum gap that several members may cause if they fall silent one after another within an attempt: their
time-outs take 10 s, and a round follows. It was once 16 to 50 s.
"""
SILENT_SECONDS = 7.0
"""Maximum gap that one silent member may cause. The time-out for its first sign of life is 3.5 s, and for its
proposal 2 s.
"""


class Members:
    """Honest members that average repeatedly, and the times at which each completed a round."""

    def __init__(self, runs: dict[str, Participation], items: int) -> None:
        self.runs = runs
        self.completed_at: dict[str, list[float]] = {name: [trio.current_time()] for name in runs}
        self.blamed: set[tuple[str, str]] = set()
        self._items = items

    async def train(self, name: str) -> None:
        value = np.full(self._items, float(ord(name)), np.float32)
        while True:
            await trio.sleep(ROUND_SECONDS)
            made = await self.runs[name].average(value, 1.0, RoundWish())
            if made.vector is not None:
                self.completed_at[name].append(trio.current_time())

    async def watch(self) -> None:
        while True:
            for name, run in self.runs.items():
                self.blamed |= {
                    (name, n) for n, other in self.runs.items() if run.expectations.leaves_out(other.peer)
                }
            await trio.sleep(0.25)

    @property
    def longest_seconds(self) -> float:
        """Return the longest time for which any member completed no round."""
        return max(
            later - earlier
            for times in self.completed_at.values()
            for earlier, later in zip(times, [*times[1:], trio.current_time()], strict=True)
        )


class Slow(SimExecutor):
    """An executor that computes nothing before a given time."""

    until = 0.0

    async def run(self, function: Any, *, seconds: float = 0.0, apart: bool = False) -> Any:
        await trio.sleep_until(max(self.until, trio.current_time()))
        return await super().run(function, seconds=seconds, apart=apart)


@pytest.mark.parametrize(
    ("names", "kind", "items"),
    [
        ("ab", "late", SMALL),
        ("ab", "late", LARGE),
        ("ab", "frozen", LARGE),
        ("ab", "computing", SMALL),
        ("ab", "computing", LARGE),
        ("abc", "late", SMALL),
        ("abc", "computing", LARGE),
    ],
)
def test_a_stall_delays_honest_members_little_longer_than_it_lasts(names: str, kind: str, items: int) -> None:
    stalls = set[bytes]()

    class LateParticipation(Participation):
        async def _attempt(self, *arguments: Any) -> Any:
            if self.peer in stalls:
                stalls.remove(self.peer)
                await trio.sleep(STALL_SECONDS)
            return await super()._attempt(*arguments)

    async def play() -> None:
        executors = {name: Slow() for name in names}
        parts: Parts = {Participation: LateParticipation}
        async with swarm(names, executors=executors, parts=parts) as group:
            runs = {name: node.averaging.open("stall", SIGNATURE) for name, node in group.nodes.items()}
            for run in runs.values():
                await run.wait_for_peers(len(names) - 1)
            members = Members(runs, items)
            async with trio.open_nursery() as nursery:
                for name in names:
                    nursery.start_soon(members.train, name)
                nursery.start_soon(members.watch)
                await trio.sleep(4.0)
                assert all(len(times) > 4 for times in members.completed_at.values())
                stalled = group.nodes["a"].peer
                if kind == "late":
                    stalls.add(stalled)
                elif kind == "frozen":
                    group.medium.freeze(stalled, STALL_SECONDS)
                executors["a"].until = trio.current_time() + (0.0 if kind == "late" else STALL_SECONDS)
                await trio.sleep(13.0)
                assert members.longest_seconds < APART_SECONDS, members.completed_at
                assert not members.blamed
                nursery.cancel_scope.cancel()

    run_virtually(play)


@pytest.mark.parametrize(("names", "items"), [("ab", SMALL), ("ab", LARGE), ("abc", LARGE)])
def test_only_the_silent_member_of_a_group_is_blamed(names: str, items: int) -> None:
    class Nothing:
        sent_bytes = received_bytes = 0

    class SilentParticipation(Participation):
        async def _attempt(self, *_: Any) -> Any:
            await trio.sleep(1.0)
            return Nothing, NotAveraged(Reason.CANCELLED)

    async def play() -> None:
        async with swarm(names + "s", parts_of={"s": {Participation: SilentParticipation}}) as group:
            runs = {name: node.averaging.open("silent", SIGNATURE) for name, node in group.nodes.items()}
            for run in runs.values():
                await run.wait_for_peers(len(names))
            members = Members({name: runs[name] for name in names}, items)
            enters = Members({"s": runs["s"]}, items)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(enters.train, "s")
                for name in names:
                    nursery.start_soon(members.train, name)
                nursery.start_soon(members.watch)
                await trio.sleep(18.0)
                assert members.longest_seconds < SILENT_SECONDS, members.completed_at
                assert all(len(times) > 15 for times in members.completed_at.values())
                assert not members.blamed
                nursery.cancel_scope.cancel()

    run_virtually(play)


@pytest.mark.parametrize(("items", "messages"), [(SMALL, 1), (LARGE, 0)])
def test_a_member_silent_in_every_attempt_costs_one_time_out_each(items: int, messages: int) -> None:
    silent_peers, sent = set[bytes](), Counter[tuple[bytes, bytes]]()

    class SilentRunner(Runner):
        async def _send_one(self, stream: Any, peer: Any) -> bool:
            if self._network.peer in silent_peers:
                sent[self.attempt.id, peer] += 1
                if sent[self.attempt.id, peer] > messages:  # the stream stays open
                    await self._closed.wait()
                    return False
            return await super()._send_one(stream, peer)

    async def play() -> None:
        async with swarm("abs", parts_of={"s": {Runner: SilentRunner}}) as group:
            runs = {name: node.averaging.open("silent", SIGNATURE) for name, node in group.nodes.items()}
            for run in runs.values():
                await run.wait_for_peers(2)
            members = Members({name: runs[name] for name in "ab"}, items)
            enters = Members({"s": runs["s"]}, items)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(enters.train, "s")
                for name in "ab":
                    nursery.start_soon(members.train, name)
                await trio.sleep(5.0)
                silent_peers.add(runs["s"].peer)
                await trio.sleep(75.0)
                assert members.longest_seconds < GAP_SECONDS, members.completed_at
                assert all(len(times) > 40 for times in members.completed_at.values())
                nursery.cancel_scope.cancel()

    run_virtually(play)
