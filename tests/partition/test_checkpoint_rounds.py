"""How members agree on checkpoints: despite failures and delays, a complete checkpoint is on enough disks."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.plan import NO_HASH, Plan, StagePlan, plan_hash
from partition.run.asks import Ask, Asks, Done, KeepStage, NameCheckpoint, Reply, Unanswered
from partition.run.checkpoint_rounds import COPIES_MIN, CheckpointRounds
from partition.run.events import CheckpointEnded, CheckpointWhole, Event, NewestChanged, SealWanted
from partition.run.messages import Checkpointed
from partition.run.way_back import WaysBack
from tests.partition.fake_stage import peer

A, B, C, D, E, STRANGER = (peer(name) for name in "abcdex")
PLAN = Plan(
    run=bytes(32),
    parent=NO_HASH,
    height=0,
    roster=tuple(sorted((A, B, C, D, E))),
    trainers=(E,),
    microbatches=2,
    stages=(StagePlan(0, 1, (A, B), (1, 1)), StagePlan(1, 2, (C, D), (1, 1))),
)
LATER = replace(PLAN, parent=plan_hash(PLAN), height=1)
NAME = b"n" * 32


SILENT = Unanswered("timeout")


class Committer:
    """The committer's checkpoints while all members are present. `sends` holds the messages that it sends."""

    def __init__(self) -> None:
        self.asks = Asks()
        self.events: list[Event] = []
        self.learned = 0
        self.sends: list[tuple[PeerId, Checkpointed]] = []
        self.plan = PLAN
        self.rounds = CheckpointRounds(
            PeerId(PLAN.committer),
            plan=lambda: self.plan,
            ways_back=WaysBack(save_every=4),
            best=lambda: None,
            asks=self.asks,
            events=self.events,
            live=lambda: (A, B, C, D),
            tell=lambda peers, message: self.sends.extend((peer, message) for peer in peers),
            learned=lambda _now: self._learn(),
        )

    def _learn(self) -> None:
        self.learned += 1

    def save_all(self, step: int, plan: Plan = PLAN) -> None:
        self.plan = plan
        for number, stage in enumerate(plan.stages):
            self.rounds.saved(PeerId(stage.replicas[0]), step, number, f"{number} at {step}")

    def newest(self) -> tuple[bytes, int] | None:
        return self.rounds.newest

    def taken(self) -> list[Event]:
        events, self.events[:] = list(self.events), []
        return events

    def asked(self) -> list[Ask]:
        return list(self.asks.take())

    def answer(self, reply: Reply | None = None) -> list[KeepStage]:
        """Answer all requests to keep a stage, and those that follow. Return them in the order in which they
        were made."""
        found = []
        while asked := self.asked():
            for ask in asked:
                assert isinstance(ask.request, KeepStage), ask
                found.append(ask.request)
                self.rounds.replied(0.0, ask.number, reply or Done())
        return found

    def spread(self) -> KeepStage:
        """Answer no request. Return the first one."""
        first = self.asked()[0].request
        assert isinstance(first, KeepStage)
        return first


def test_a_checkpoint_is_spread_sealed_named_stored_and_announced() -> None:
    node = Committer()
    node.save_all(4)
    kept = node.answer()
    assert {(each.stage, each.state, each.saver) for each in kept} == {(0, "0 at 4", A), (1, "1 at 4", C)}
    assert node.taken() == [SealWanted(PLAN, 4, ("0 at 4", "1 at 4"))]
    node.rounds.sealed(0.0, 4, NAME)
    named = node.asked()
    assert {ask.request for ask in named} == {NameCheckpoint(PLAN, 4, NAME)}
    assert PeerId(PLAN.committer) not in {ask.peer for ask in named}
    assert node.newest() is None
    for ask in named:
        node.rounds.replied(0.0, ask.number, Done())
    assert node.newest() == (NAME, 4)
    assert node.taken() == [NewestChanged((NAME, 4)), CheckpointEnded()]
    assert (node.learned, node.sends) == (1, []), "the checkpoint was learned before its name was on the disk"
    node.rounds.stored((NAME, 4))
    (whole,) = node.taken()
    assert isinstance(whole, CheckpointWhole)
    assert whole.copies == 3
    assert {peer for peer, _ in node.sends} == {A, B, C, D}
    assert {message for _, message in node.sends} == {Checkpointed(plan_hash(PLAN), 4, NAME)}


def test_a_keeper_is_asked_for_one_stage_after_the_other() -> None:
    node = Committer()
    node.save_all(4)
    while asked := node.asked():
        peers = [ask.peer for ask in asked]
        assert len(set(peers)) == len(peers)
        for ask in asked:
            node.rounds.replied(0.0, ask.number, Done())
    assert isinstance(node.taken()[0], SealWanted)


def test_a_checkpoint_on_one_disk_is_never_whole() -> None:
    node = Committer()
    node.save_all(4)
    first = node.asked()
    stage = next(ask.request.stage for ask in first if isinstance(ask.request, KeepStage))
    for ask in first:
        assert isinstance(ask.request, KeepStage)
        failed = ask.request.stage == stage and ask is not first[0]
        node.rounds.replied(0.0, ask.number, SILENT if failed else Done())
    while asked := node.asked():
        for ask in asked:
            assert isinstance(ask.request, KeepStage)
            node.rounds.replied(0.0, ask.number, SILENT if ask.request.stage == stage else Done())
    assert node.taken() == [CheckpointEnded()]
    node.save_all(8)
    node.answer()
    assert isinstance(node.taken()[0], SealWanted)
    node.rounds.sealed(0.0, 8, NAME)
    for ask in node.asked():
        node.rounds.replied(0.0, ask.number, SILENT)
    assert node.taken() == [CheckpointEnded()]
    assert node.newest() is None


def test_a_checkpoint_that_cannot_be_sealed_gives_way_to_the_next() -> None:
    node = Committer()
    node.save_all(4)
    node.answer()
    node.save_all(8)
    node.rounds.seal_failed(4)
    assert node.spread().step == 8
    assert node.newest() is None


def test_checkpoints_are_spread_one_at_a_time_newest_first() -> None:
    node = Committer()
    for step in (4, 8, 12):
        node.save_all(step)
    assert list(dict.fromkeys(each.step for each in node.answer(SILENT))) == [4, 12]


def test_the_best_state_is_spread_in_its_turn_despite_newer_ones() -> None:
    node = Committer()
    node.save_all(4)
    node.rounds.best_step = 8
    for step in (8, 12, 16):
        node.save_all(step)
    assert list(dict.fromkeys(each.step for each in node.answer(SILENT))) == [4, 8, 16]


def test_states_saved_under_a_later_plan_are_spread_under_it() -> None:
    node = Committer()
    node.save_all(4)
    node.save_all(8, LATER)
    assert list(dict.fromkeys((each.plan, each.step) for each in node.answer(SILENT))) == [
        (PLAN, 4),
        (LATER, 8),
    ]


def test_late_saves_of_an_earlier_plan_are_ignored() -> None:
    node = Committer()
    node.save_all(8, LATER)
    assert {each.plan for each in node.answer(SILENT)} == {LATER}
    node.taken()
    node.save_all(12)
    assert (node.asked(), node.taken()) == ([], [])


def test_an_abandoned_branchs_checkpoint_is_forgotten_on_disk_too() -> None:
    node = Committer()
    node.rounds.learn(0.0, 8, NAME)
    node.rounds.forget_after(8)
    assert node.newest() == (NAME, 8)
    node.rounds.forget_after(7)
    assert node.newest() is None
    assert node.taken() == [NewestChanged((NAME, 8)), NewestChanged(None)]


@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_checkpoint_of_an_abandoned_branch_is_not_learned_afterwards(is_sealed: bool) -> None:
    node = Committer()
    node.save_all(8)
    open_asks = node.asked()
    if is_sealed:
        for ask in open_asks:
            node.rounds.replied(0.0, ask.number, Done())
        node.answer()
        assert any(isinstance(event, SealWanted) for event in node.taken())
        node.rounds.sealed(0.0, 8, NAME)
        open_asks = node.asked()
    assert open_asks
    node.rounds.forget_after(7)
    for ask in open_asks:
        node.rounds.replied(0.0, ask.number, Done())
    node.rounds.sealed(0.0, 8, NAME)
    assert (node.newest(), node.asked(), node.taken()) == (None, [], [CheckpointEnded()])
    # The next checkpoint is spread as usual.
    node.save_all(9, LATER)
    node.answer()
    assert node.taken() == [SealWanted(LATER, 9, ("0 at 9", "1 at 9"))]


def test_only_holders_of_a_stage_can_have_saved_it() -> None:
    node = Committer()
    for sender, stage in ((STRANGER, 0), (A, 1), (A, 7), (A, -1)):
        with pytest.raises(RemoteProtocolError):
            node.rounds.saved(sender, 4, stage, "")
    assert (node.asked(), node.taken()) == ([], [])


CALLS = ["save", "answer", "refuse", "seal", "fail", "learn", "store"]


@given(st.lists(st.tuples(st.sampled_from(CALLS), st.integers(0, 7))))
def test_whole_checkpoints_only_advance_and_are_on_enough_disks(calls: list[tuple[str, int]]) -> None:
    node, newest = Committer(), -1
    rounds = node.rounds
    asked: list[Ask] = []
    have: dict[tuple[int, int], set[PeerId]] = {}
    taken: dict[int, set[PeerId]] = {}
    acts: dict[str, Callable[[int], None]] = {
        "save": node.save_all,
        "learn": lambda step: rounds.learn(0.0, step, bytes([step + 1]) * 32),
        "fail": rounds.seal_failed,
        "seal": lambda step: rounds.sealed(0.0, step, bytes([step + 1]) * 32),
        "store": lambda _step: rounds.stored(rounds.newest),
    }
    for call, number in calls:
        asked += node.asked()
        if call in acts:
            acts[call](number)
        elif asked:
            ask = asked.pop(number % len(asked))
            if call == "answer" and isinstance(ask.request, KeepStage):
                have.setdefault((ask.request.step, ask.request.stage), set()).add(ask.peer)
            elif call == "answer" and isinstance(ask.request, NameCheckpoint):
                taken.setdefault(ask.request.step, set()).add(ask.peer)
            rounds.replied(0.0, ask.number, Done() if call == "answer" else SILENT)
        for event in node.taken():
            match event:
                case CheckpointWhole():
                    named = taken.get(event.step, set()) | {PeerId(PLAN.committer)}
                    rows = [have[event.step, stage] & named for stage in range(len(PLAN.stages))]
                    assert all(len(row) >= COPIES_MIN for row in rows)
                case NewestChanged():
                    assert event.newest is not None
                    assert event.newest[1] > newest
                    newest = event.newest[1]
        assert rounds.newest is None or rounds.newest[1] == newest
    assert not node.sends or node.learned
