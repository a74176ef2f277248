"""The cost of members that are listed in a run of the optimizer but contribute nothing.

Real nodes in threads of this process. The tests count delayed rounds, not seconds.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import log2
from typing import Any

import numpy as np
import pytest
import torch
import trio

from crypto.identity import PeerId
from gossip.averaging.attendance import LATE_SECONDS_MIN, SHORT_SECONDS
from gossip.claims import SLACK_STEPS
from gossip.matchmaking import GroupWish
from node.averaging.expectations import Expectations
from node.averaging.participation import Participation
from node.averaging.rounds import Round, RoundWish
from node.library.sync import SyncNode
from tests.hostile.silent import Silence, SilentParticipant
from tests.node.optimizer.test_liars import Options, Trainer
from tests.node.optimizer.test_wrapper import adamw, model_of, open_nodes, until

torch.set_num_threads(1)
RUNS = itertools.count()
BATCH: Options = {"target_batch_size": 64, "window_seconds": 5.0}
LOCAL: Options = {"local_steps": 4, "window_seconds": 5.0}
ROUNDS = 10
HELD_UP_MAX = 5
"""Maximum number of delayed rounds; one or two are usual."""
BACKOFF_SECONDS = 5.0
"""About the time for which a silent member is first left out; the time then doubles. If the rounds take twice
as long on a slow machine, one more try falls within them."""
LONE_STEPS = 6
Finished = tuple[GroupWish, float]


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SyncNode]]:
    with ExitStack() as stack:
        yield open_nodes(stack, tmp_path_factory.mktemp("silence"), 3)


Start = Callable[[Options, int], tuple[str, list[Trainer]]]


@pytest.fixture
def start(nodes: list[SyncNode]) -> Iterator[Start]:
    with ExitStack() as stack:

        def begin(options: Options, count: int) -> tuple[str, list[Trainer]]:
            name = f"silence-{next(RUNS)}"
            members = []
            for number in range(count):
                members.append(Trainer(nodes[number], number, name, options))
                members[-1].begin()
                stack.callback(members[-1].close)
            for each in members:
                stack.callback(each.end)
            until(lambda: count == 1 or all(each.optimizer.stats.rounds >= 3 for each in members))
            return name, members

        yield begin


def peer_of(me: SyncNode) -> PeerId:
    peer: PeerId = me._portal.subject.network.peer
    return peer


@pytest.fixture
def wishes(monkeypatch: pytest.MonkeyPatch) -> Callable[[SyncNode], list[Finished]]:
    """Return a function that lists a node's finished group wishes. Each comes with the seconds for which it
    waited after the last of the others was ready."""
    made: list[tuple[PeerId, Finished]] = []
    original = Expectations.ended

    def ended(self: Expectations, wish: GroupWish, *, is_kept: bool) -> Sequence[bytes]:
        if is_kept:
            waited = self._clock.monotonic() - max([wish.begun_at, *wish.ready_at.values()])
            made.append((self._me, (wish, waited)))
        return original(self, wish, is_kept=is_kept)

    monkeypatch.setattr(Expectations, "ended", ended)
    return lambda me: [wish for peer, wish in made if peer == peer_of(me)]


def held_up(wishes: Sequence[Finished], silent: PeerId) -> int:
    """Return how many of the wishes waited for the silent member, or included it in an exchange. A member
    that expects it does not wait if another member proposes the group."""
    return sum(
        (silent in wish.expected and waited >= LATE_SECONDS_MIN - SHORT_SECONDS)
        or (wish.group is not None and silent in wish.group.peers)
        for wish, waited in wishes
    )


@pytest.mark.parametrize("options", [BATCH, LOCAL])
@pytest.mark.parametrize("silence", ["absent", "ready"])
def test_a_silent_member_delays_few_rounds(
    nodes: list[SyncNode],
    start: Start,
    wishes: Callable[[SyncNode], list[Finished]],
    options: Options,
    silence: Silence,
) -> None:
    name, members = start(options, 2)
    silent = SilentParticipant(nodes[2], adamw(model_of(9)), name, silence=silence, **options)  # type: ignore[arg-type]  # no `samples`
    try:
        until(lambda: all(each.optimizer.stats.peers == 2 for each in members))
        rounds = [each.optimizer.stats.rounds for each in members]
        before = [len(wishes(each.me)) for each in members]
        began = time.monotonic()
        until(
            lambda: all(
                each.optimizer.stats.rounds >= count + ROUNDS
                for each, count in zip(members, rounds, strict=True)
            )
        )
        tries = int(log2(max(1.0, (time.monotonic() - began) / BACKOFF_SECONDS)))
        for each, count in zip(members, before, strict=True):
            assert held_up(wishes(each.me)[count:], peer_of(nodes[2])) <= HELD_UP_MAX + tries
    finally:
        silent.close()


def test_a_lone_trainer_continues_despite_a_silent_member(
    nodes: list[SyncNode], start: Start, wishes: Callable[[SyncNode], list[Finished]]
) -> None:
    options: Options = {"target_batch_size": 32, "window_seconds": 0.5}
    name, (trainer,) = start(options, 1)
    silent = SilentParticipant(nodes[2], adamw(model_of(9)), name, **options)  # type: ignore[arg-type]  # no `samples`
    try:
        until(lambda: trainer.optimizer.stats.peers == 1)
        reached, before = trainer.optimizer.global_step, len(wishes(trainer.me))
        until(lambda: trainer.optimizer.global_step >= reached + LONE_STEPS)
        assert held_up(wishes(trainer.me)[before:], peer_of(nodes[2])) <= LONE_STEPS // 2
    finally:
        silent.close()


def test_a_round_started_after_leaving_its_run_ends_immediately(nodes: list[SyncNode]) -> None:
    """The training thread requests a round while a different thread closes the optimizer, so no peer answers
    that wish.
    """
    silent = SilentParticipant(nodes[2], adamw(model_of(9)), "left", **BATCH)  # type: ignore[arg-type]  # no `samples`
    silent.close()

    async def hold() -> Round:
        with trio.fail_after(30):
            held: Round = await silent.run.average(np.zeros(4, np.float32), 1.0, RoundWish(round=3))
            return held

    made: Round = silent._portal.run(hold)
    assert "takes no further part" in made.error


@pytest.fixture
def miss(monkeypatch: pytest.MonkeyPatch) -> Callable[[Trainer], Callable[[], bool]]:
    """Return a function that makes a member lose the result of its next successful round, as if its machine
    had stalled. That function returns a check: whether the loss has happened.
    """
    original = Participation.average
    victims: set[PeerId] = set()

    async def average(self: Participation, *arguments: Any) -> Round:
        made = await original(self, *arguments)
        if made.is_averaged and self.peer in victims:
            victims.remove(self.peer)
            return replace(made, vector=None, digest=b"", error="lost by the test")
        return made

    monkeypatch.setattr(Participation, "average", average)

    def begin(member: Trainer) -> Callable[[], bool]:
        victims.add(peer_of(member.me))
        return lambda: not victims

    return begin


def comes_back(late: Trainer, other: Trainer, loaded: int) -> None:
    """Wait until a member has adopted the state of another, and both average again and have the same
    lineage."""
    until(lambda: late.optimizer.stats.states_loaded > loaded)
    rounds = late.optimizer.stats.rounds
    until(lambda: late.optimizer.stats.rounds >= rounds + 3)
    until(lambda: late.optimizer._lineage == other.optimizer._lineage)


def test_a_member_that_missed_a_round_recovers_despite_a_silent_one(
    nodes: list[SyncNode], start: Start, miss: Callable[[Trainer], Callable[[], bool]]
) -> None:
    """The silent member claims to be at each step but never hands over its state."""
    name, members = start(BATCH, 2)
    silent = SilentParticipant(nodes[2], adamw(model_of(9)), name, silence="ready", **BATCH)  # type: ignore[arg-type]  # no `samples`
    try:
        until(lambda: all(each.optimizer.stats.peers == 2 for each in members))
        loaded = members[1].optimizer.stats.states_loaded
        until(miss(members[1]))
        comes_back(members[1], members[0], loaded)
    finally:
        silent.close()


def test_a_member_that_missed_a_round_recovers_despite_a_paused_one(
    start: Start, miss: Callable[[Trainer], Callable[[], bool]]
) -> None:
    """Only one other member has made the step. When its claim alone was not enough, all three members trained
    apart for good."""
    _, members = start({"target_batch_size": 64, "window_seconds": 0.5}, 3)
    *members, paused = members
    paused.goes_on.clear()
    reached = paused.optimizer.global_step + SLACK_STEPS + 1
    until(lambda: all(each.optimizer.global_step >= reached for each in members))
    loaded = members[1].optimizer.stats.states_loaded
    until(miss(members[1]))
    comes_back(members[1], members[0], loaded)
