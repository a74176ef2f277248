"""The step machines under every disturbance of the world, and planted bugs that the world must find.

`PEERLOOM_WALK_EVENTS=1000000` walks until this many events have happened, and prints their outcome (with
`pytest -s`).
"""

import os
import sys
from collections import Counter
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from crypto.identity import PeerId
from partition.plan.plan import Plan
from partition.steps.committer import Committer
from partition.steps.feeder import Feeder
from partition.steps.frame_complaints import USELESS
from partition.steps.frames import OpenedFrame
from partition.steps.messages import EVALUATIONS_IN_FLIGHT_MAX, Apply, BadFrame, Open, Reduced, Sends, Synced
from partition.steps.replica import ReduceReady, Replica, SaveReady, WorkItem
from partition.steps.stall_detector import STUCK
from partition.steps.validation import ValidationSettings
from tests.partition.fake_stage import Broken, peer
from tests.partition.steps_machine import Settings
from tests.partition.steps_trouble import DISTURBANCES, kill
from tests.partition.steps_world import World

WALKS = 300
EVENTS_WANTED = int(os.environ.get("PEERLOOM_WALK_EVENTS", "0"))
PLANTED_WALKS = 1_500
"""Number of walks in which a planted bug must be found; most are found within some dozens."""
KINDS = (
    DISTURBANCES,
    DISTURBANCES,
    ("suspect", "freeze", "break"),
    ("suspect", "suspect", "kill", "trainer", "break", "freeze", "join"),
)


def walk(seed: int, *, kinds: tuple[str, ...] = (), **settings: Any) -> World:
    """Play one history of a small run; raise Broken with the seed."""
    rng = Random(seed)
    drawn: dict[str, Any] = {
        "steps": rng.randint(1, 4),
        "evaluations": rng.choice((0, 0, 0, 3, 3, 40)),
        "save_every": rng.choice((0, 0, 1, 2)),
        "schedule": rng.choice(("1f1b", "gpipe")),
        "in_flight_max": rng.choice((1, 2, 64)),
        "frozen": rng.choice((0, 0, 0, 1, 2)),
    }
    every, patience = rng.choice((0, 1, 2)), rng.choice((0, 1))
    if every:
        drawn["validations"] = rng.choice((1, 3, 40))
        drawn["validation"] = ValidationSettings(every, patience, watched=rng.choice((0, 1)))
    world = World(
        rng,
        [rng.choice((1, 2, 2, 3)) for _ in range(rng.randint(1, 3))],
        microbatches=rng.randint(1, 8),
        trainers=rng.randint(1, 3),
        spares=rng.randint(0, 3),
        settings=Settings(**(drawn | settings)),
    )
    disturbances, chance = rng.randint(0, 12), rng.choice((0.005, 0.02, 0.06))
    try:
        world.run(disturbances, chance=chance, kinds=kinds or rng.choice(KINDS))
    except Broken as broken:
        raise Broken(f"seed {seed}: {broken}") from broken
    return world


# Whole histories


def test_an_undisturbed_run_commits_every_step_once_and_equals_the_expected_run() -> None:
    for schedule in ("1f1b", "gpipe"):
        settings = Settings(steps=3, evaluations=5, schedule=schedule)
        world = World(Random(1), [2, 1, 3], microbatches=4, trainers=2, settings=settings)
        world.run(0)
        assert world.outcome == "done"
        assert world.committed == [(0, 0), (0, 1), (0, 2)]


def test_validations_between_steps_do_not_change_the_steps() -> None:
    every_step = ValidationSettings(1)
    settings = Settings(steps=3, evaluations=5, validations=2, validation=every_step)
    world = World(Random(1), [2, 1, 3], microbatches=4, trainers=2, settings=settings)
    world.run(0)
    assert (world.outcome, world.committed) == ("done", [(0, 0), (0, 1), (0, 2)])
    assert world.seen["Validated"] == 3


def test_random_walks_change_no_sum_and_lose_nothing_silently() -> None:
    outcomes: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    events = histories = 0
    while histories < WALKS or events < EVENTS_WANTED:
        world = walk(histories)
        histories += 1
        events += world.events
        outcomes[str(world.outcome)] += 1
        seen.update(world.seen)
    if EVENTS_WANTED:
        told = f"{events} events in {histories} histories: {dict(outcomes)}; {dict(sorted(seen.items()))}"
        sys.stderr.write(f"\n{told}\n")
    assert outcomes["done"] > histories * 0.7  # the others lost a stage, and the world has checked that
    assert outcomes["failed"] > 0
    wanted = (
        "SubtractReady",
        "ForgetReady",
        "FillReady",
        "SaveReady",
        "StepDiscarded",
        "ReplicaRebuilt",
        "stuck",
        "Validated",
    )
    assert all(seen[name] for name in (*wanted, "MicrobatchesMoved", "ReplicaFailed", "StepsPaused"))


def test_a_stage_without_replica_and_copy_ends_the_run() -> None:
    world = World(Random(3), [1, 2], microbatches=2, settings=Settings(steps=2, evaluations=1))
    kill(world, world.machines[peer("s0r0")])
    world.run(0)
    assert world.outcome == "failed"
    assert "without stage 0" in world.reason


def test_a_stage_without_a_replica_resumes_from_its_copies() -> None:
    settings = Settings(steps=3, evaluations=0, save_every=1)
    world = World(Random(3), [1, 2], microbatches=2, spares=1, settings=settings)
    while len(world.copies.get(2, ())) < 2:
        world.step()
    kill(world, world.machines[peer("s0r0")])
    world.run(0)
    assert world.outcome == "done"
    assert (world.plan.step, world.chain()) == (2, [0, 1, 2])


@pytest.mark.parametrize("seed", range(6))
def test_a_long_evaluation_keeps_no_more_frames_than_are_in_flight(seed: int) -> None:
    most = 0

    class Watched(Replica):
        def receive(self, now: float, sender: PeerId, message: Any) -> Sends:
            nonlocal most
            sends = super().receive(now, sender, message)
            most = max(most, len(self._kept), len(self._held_out.microbatches))
            return sends

    settings = Settings(steps=0, evaluations=3 * EVALUATIONS_IN_FLIGHT_MAX, replica_class=Watched)
    world = World(Random(seed), [2, 2, 2], microbatches=1, settings=settings)
    world.run(4, chance=0.01)
    assert most <= EVALUATIONS_IN_FLIGHT_MAX


# Bugs planted on purpose: the world must find them


class TakesNoDoubleOut(Replica):
    def _committed(self, step: int) -> WorkItem:
        self._named = frozenset(self._order.counted)
        return super()._committed(step)


class CountsAReplayTwice(Replica):
    def _frame(self, sender: PeerId, frame: OpenedFrame) -> None:
        number = frame.header.microbatch
        if frame.header.train and number in self._order.counted:
            self._order.forget(number)
        super()._frame(sender, frame)


class AppliesBeforeAllHaveReduced(Replica):
    def reduced(self, done: ReduceReady, digest: bytes, squared_norm: float | None = None) -> Sends:
        sends = super().reduced(done, digest, squared_norm)
        self._apply = Apply(plan=done.plan, step=done.step, attempt=done.attempt, samples=1, squared_norm=1.0)
        return sends


class ForgetsKeptFrames(Replica):
    def _open(self, message: Open) -> Sends:
        super()._open(message)
        return []


class IgnoresMovedNumbers(Replica):
    def _open(self, message: Open) -> Sends:
        return (
            [] if self._routes is not None and message.step == self._routes.step else super()._open(message)
        )


class KeepsItsPlacesInFlight(Replica):
    def _count(self, number: int, gradient: object | None, samples: int, loss: float) -> Sends:
        sends = super()._count(number, gradient, samples, loss)
        if not self.is_last:
            self._order.in_flight.add(number)
        return sends


class HoldsMoreThanItMay(Replica):
    @property
    def in_flight_max(self) -> int:
        return 1

    def _pass(self, step: int) -> WorkItem | None:
        chosen = self._order.next_pass(self._owns, 64)
        if chosen is None or chosen[0] == "backward":
            return None if chosen is None else self._back(step, chosen[1])
        return self._forward_of(chosen[1], self._order.microbatches[chosen[1]], train=True)

    def _back(self, step: int, number: int) -> WorkItem | None:
        self._order.microbatches[number].backward = "waiting"
        self._order.offer((number,))
        return super()._pass(step)


class ForgetsNothingThatIsMoved(Replica):
    def _choose(self) -> WorkItem | None:
        held, self._order.in_flight = self._order.in_flight, set()
        found = super()._choose()
        self._order.in_flight = held
        return found


class SaysNothingAgain(Replica):
    def reconnected(self, peer: PeerId) -> Sends:
        return []


class KeepsNoHeldOutFrames(Replica):
    def _evaluated(self, *args: Any) -> Sends:
        sends = super()._evaluated(*args)
        self._kept.drop(lambda key: not key[0])
        return sends


class ForgetsTheTotalUnderANewPlan(Replica):
    def adopt(self, plan: Plan) -> None:
        super().adopt(plan)
        self._reduced = None


class ForgetsWhatItCountedUnderANewPlan(Replica):
    def adopt(self, plan: Plan) -> None:
        super().adopt(plan)
        for number in list(self._order.counted):
            self._order.forget(number)


class SendsNothingAgainUnderANewPlan(Replica):
    def _send(self, key: Any) -> Sends:
        kept = self._kept._kept.get(key)
        return [] if kept is not None and kept.receiver is not None else super()._send(key)


class AnswersWhileItComputes(Replica):
    def _answer_sync(self) -> Sends:
        busy, self._busy = self._busy, None
        sends = super()._answer_sync()
        self._busy = busy
        return sends


class KeepsItsSumsOverACheckpoint(Replica):
    def _choose(self) -> WorkItem | None:
        self._discard = False
        return super()._choose()


class CopiesAfterTheNextStep(Replica):
    def _choose(self) -> WorkItem | None:
        save, self._save = self._save, None
        if save is not None and self.step is not None and save < self.step:
            return SaveReady(self.plan_hash, save)
        found = super()._choose()
        self._save = save
        return found


class CommitsWithANumberMissing(Committer):
    def _commit_step(self) -> Sends:
        sends = super()._commit_step()
        assert self._commit is not None
        rows = [replace(row, microbatches=row.microbatches[1:]) for row in self._commit.replicas]
        return [(who, replace(self._commit, replicas=tuple(rows))) for who, _ in sends]


class ForgetsTheAttempt(Committer):
    def _open_again(self) -> Sends:
        return self._to_everybody(self._open_message())


class TakesTheWordOfSome(Committer):
    def _on_reduced(self, sender: PeerId, message: Reduced) -> Sends:
        for other in self._places:
            self._reduced.setdefault(other, message)
        return super()._on_reduced(sender, message)


class LeavesAStepHalfApplied(Committer):
    def _when_synced(self) -> Sends:
        self.step = max(row.step or 0 for row in self._synced.values())
        self._digests = {name: row.digest for name, row in self._synced.items()}
        return self._go_on()


class ForgetsTheNormOfAHalfAppliedStep(Committer):
    def _when_synced(self) -> Sends:
        return [
            (who, replace(message, squared_norm=None) if isinstance(message, Apply) else message)
            for who, message in super()._when_synced()
        ]


class FillsNobody(Committer):
    def _repair(self) -> Sends:
        return self._go_on()


class GivesWhatIsCountedToAnother(Committer):
    def _take_synced(self) -> bool:
        kept = super()._take_synced()
        for stage, owners in enumerate(self._ledger._owners):
            for number in owners:
                owners[number] = (owners[number] + 1) % len(self.plan.stages[stage].replicas)
        return kept


class ForgetsWhatWasCounted(Committer):
    def _take_synced(self) -> bool:
        self._synced = {
            name: replace(row, counted=(), samples=(), losses=()) for name, row in self._synced.items()
        }
        return super()._take_synced()


class AsksOnlyOnce(Committer):
    @property
    def deadline(self) -> float:
        return float("inf")


class TellsNothingOfAnothersStep(Committer):
    def _tell(self, apply: Apply) -> None:
        if self._commit is not None:
            super()._tell(apply)


class SkipsTheCheckpointAfterAnothersStep(Committer):
    def _mind_checkpoint(self) -> None:
        if self._commit is not None:
            super()._mind_checkpoint()


class WaitsForWhoHangs(Committer):
    def _hurry(self) -> Sends:
        self._overdue.due = float("inf")
        return []


class DropsWhoeverIsLate(Committer):
    def _hurry(self) -> Sends:
        for late in self._late():
            self._give_up(late, f"{STUCK}: it is late")
        return super()._hurry()


class BelievesWhoeverAccuses(Committer):
    def _on_unusable(self, sender: PeerId, place: Any, message: BadFrame) -> Sends:
        self._give_up(PeerId(message.frame.author), f"{USELESS}: {message.reason}")
        return []


class BelievesNobody(Committer):
    def _on_unusable(self, sender: PeerId, place: Any, message: BadFrame) -> Sends:
        return []


class NamesNobody(Replica):
    def refused(self, done: Any, direction: Any, reason: str, of_values: bool = False) -> Sends:
        self._busy = None
        return self.failed(reason)


class CommitsAnotherLoss(Committer):
    def _on_synced(self, sender: PeerId, message: Synced) -> Sends:
        return super()._on_synced(sender, replace(message, losses=(0.0,) * len(message.losses)))


class FeedsEachNumberOnce(Feeder):
    def _feed(self, routes: Any, number: int, *, again_to: PeerId | None) -> None:
        if not any(key[0] == number for key in self._sent):
            super()._feed(routes, number, again_to=again_to)


NEW_PLANS = ("trainer", "trainers", "join", "pause")
MOVES = ("suspect", "suspect", "freeze")
PLANTED: list[tuple[type, dict[str, Any]]] = [
    (TakesNoDoubleOut, {"kinds": MOVES}),
    (CountsAReplayTwice, {"kinds": NEW_PLANS}),
    (AppliesBeforeAllHaveReduced, {}),
    (ForgetsKeptFrames, {"kinds": NEW_PLANS}),
    (IgnoresMovedNumbers, {"kinds": MOVES}),
    (KeepsItsPlacesInFlight, {}),
    (HoldsMoreThanItMay, {}),
    (ForgetsNothingThatIsMoved, {"kinds": MOVES}),
    (SaysNothingAgain, {"kinds": ("break",)}),
    (KeepsNoHeldOutFrames, {"kinds": MOVES, "steps": 1, "evaluations": 80}),
    (ForgetsTheTotalUnderANewPlan, {"kinds": NEW_PLANS}),
    (ForgetsWhatItCountedUnderANewPlan, {"kinds": NEW_PLANS}),
    (SendsNothingAgainUnderANewPlan, {"kinds": (*NEW_PLANS, "break")}),
    (AnswersWhileItComputes, {"kinds": NEW_PLANS}),
    (KeepsItsSumsOverACheckpoint, {"kinds": ("restore",), "save_every": 1}),
    (CopiesAfterTheNextStep, {"save_every": 1}),
    (CommitsWithANumberMissing, {}),
    (ForgetsTheAttempt, {"kinds": MOVES}),
    (TakesTheWordOfSome, {}),
    (LeavesAStepHalfApplied, {"kinds": NEW_PLANS}),
    (ForgetsTheNormOfAHalfAppliedStep, {"kinds": NEW_PLANS}),
    (FillsNobody, {"kinds": ("join",)}),
    (GivesWhatIsCountedToAnother, {"kinds": NEW_PLANS}),
    (ForgetsWhatWasCounted, {"kinds": NEW_PLANS}),
    (AsksOnlyOnce, {"kinds": NEW_PLANS}),
    (CommitsAnotherLoss, {"kinds": NEW_PLANS}),
    (TellsNothingOfAnothersStep, {"kinds": NEW_PLANS}),
    (SkipsTheCheckpointAfterAnothersStep, {"kinds": NEW_PLANS, "save_every": 1}),
    (WaitsForWhoHangs, {"kinds": ("hang",)}),
    (DropsWhoeverIsLate, {"kinds": ("hang",)}),
    (BelievesWhoeverAccuses, {"kinds": ("accuse",)}),
    (BelievesNobody, {"kinds": ("spoil",)}),
    (NamesNobody, {"kinds": ("spoil",)}),
    (FeedsEachNumberOnce, {"kinds": MOVES}),
]
"""The planted bugs, each with the parameters that reveal it soonest."""


@pytest.mark.parametrize(("bug", "settings"), PLANTED, ids=lambda value: getattr(value, "__name__", ""))
def test_the_walk_finds_a_planted_bug(bug: type, settings: dict[str, Any]) -> None:
    core = {Replica: "replica_class", Committer: "committer_class", Feeder: "feeder_class"}
    planted: dict[str, Any] = {name: bug for base, name in core.items() if issubclass(bug, base)}

    def walks() -> None:
        for seed in range(PLANTED_WALKS):
            walk(seed, **settings, **planted)

    with pytest.raises(Broken):
        walks()
