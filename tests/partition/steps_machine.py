"""One peer of the world in memory. It does what a node's shells do around the step cores, but without clock
or torch."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from crypto.encoding import encode
from crypto.facts import Fact
from crypto.identity import PeerId
from partition.codecs.codec import Payload
from partition.plan.change import Change
from partition.plan.plan import NO_HASH, Plan
from partition.steps.committer import Committer
from partition.steps.feeder import Feeder, FeedReady, FramesDone
from partition.steps.frames import Direction, FrameHeader, OpenedFrame, Outgoing
from partition.steps.messages import Work
from partition.steps.replica import (
    ApplyReady,
    BackwardReady,
    FillReady,
    FillVoided,
    ForgetReady,
    ForwardReady,
    ReduceAsked,
    ReduceReady,
    ReduceVoided,
    Replica,
    SaveReady,
    StepDiscarded,
    SubtractReady,
    WorkItem,
)
from partition.steps.validation import Series, ValidationSettings
from tests.partition.fake_stage import (
    METRICS,
    Broken,
    FakeStage,
    digest,
    input_of,
    label_of,
    loss_of,
    metrics_of,
    payload,
    samples_of,
)

SPOILED = b"whose digest does not fit"
"""A payload that no stage can use."""
MICROBATCH_NANOSECONDS = 10_000_000
ALL_STAGES = -1
"""Stands in place of a stage's number for the reduction of the weights tied between all stages."""

Sends = list[tuple[PeerId, Any]]


@dataclass(frozen=True)
class Settings:
    """The settings that all machines of a world share; the classes may be replaced by ones with a bug."""

    steps: int
    evaluations: int
    save_every: int = 0
    schedule: Any = "1f1b"
    in_flight_max: int = 64
    frozen: int = 0
    validations: int = 0
    validation: ValidationSettings | None = None
    replica_class: type[Replica] = Replica
    committer_class: type[Committer] = Committer
    feeder_class: type[Feeder] = Feeder


@dataclass
class Draft:
    """A frame without its signature."""

    header: FrameHeader
    data: bytes


@dataclass
class Reduction:
    """One all-reduce, of a stage or of the tied weights: each member's contribution, and the members that
    have the total.
    """

    members: tuple[PeerId, ...]
    brought: dict[PeerId, dict[int, int]] = field(default_factory=dict)
    taken: set[PeerId] = field(default_factory=set)


Key = tuple[bytes, int, int, int]
"""Plan, step, attempt, and the stage or ALL_STAGES."""


class Machine:
    """A peer with the roles of its plan. `work` is the current computation of its stage."""

    def __init__(self, me: PeerId, settings: Settings, plan: Plan, speed: float) -> None:
        self.me = me
        self.settings = settings
        self.speed = speed
        self.height = 0
        self.is_alive = True
        self.frozen_until = 0.0
        self.is_frozen = False
        self.parked: list[Any] = []
        self.replica: Replica | None = None
        self.stage = FakeStage(0, 1)
        self.committer: Committer | None = None
        self.feeder: Feeder | None = None
        self.work: Any = None
        self.counted = 0
        self.has_reported = False
        self.is_corrupt = False
        self.corrupts_next = False
        self.wrong_digests = 0
        self.forgotten_step = -1
        self.asked: list[ReduceAsked] = []
        self.told: list[Series] = []
        self._open_roles(plan, 0)

    # Plans

    def adopt(self, plan: Plan, change: Change, now: float) -> Sends:
        """Adopt the next plan of the chain."""
        self.height += 1
        joined = any(row.peer == self.me for row in change.joined)
        if joined or self.replica is None or plan.stage_of(self.me) is None:
            return self._open_roles(plan, None, now)
        self.replica.adopt(plan)
        return self._open_trainer(plan, now)

    def _open_roles(self, plan: Plan, step: int | None, now: float = 0.0) -> Sends:
        stage = plan.stage_of(self.me)
        self.work = self.replica = None
        self.is_corrupt = self.corrupts_next = self.has_reported = False
        self.spoils = self.accuses = 0
        self.hangs = False
        if stage is not None:
            self.stage = FakeStage(stage, len(plan.stages), self.settings.frozen)
            self.replica = self.settings.replica_class(
                self.me,
                plan,
                step=step,
                awaits_gradient=self.stage.awaits_gradient,
                in_flight_max=self.settings.in_flight_max,
                schedule=self.settings.schedule,
            )
        return self._open_trainer(plan, now)

    def _open_trainer(self, plan: Plan, now: float) -> Sends:
        self.feeder = self.committer = None
        self.forgotten_step = -1
        if plan.restored != NO_HASH:
            self.told = [series for series in self.told if series.step <= plan.step]
        if self.me in plan.trainers:
            self.feeder = self.settings.feeder_class(self.me, plan)
        if plan.committer != self.me:
            return []
        self.committer = self.settings.committer_class(
            self.me,
            plan,
            steps=self.settings.steps,
            evaluations=self.settings.evaluations,
            metrics=METRICS,
            save_every=self.settings.save_every,
            validations=self.settings.validations,
            validation=self.settings.validation,
            series=self.told[-1] if self.told else None,
        )
        return self.committer.start(now)

    # Feeding

    def fed(self) -> Iterator[tuple[PeerId, OpenedFrame]]:
        """Send the frames that the feeder requests."""
        assert self.feeder is not None
        plan = self.feeder.plan
        for event in self.feeder.events:
            match event:
                case FramesDone():
                    if event.step <= self.forgotten_step:
                        raise Broken("the frames of a step are done twice")
                    self.forgotten_step = event.step
                case FeedReady():
                    if event.train and event.step <= self.forgotten_step:
                        raise Broken("a frame is asked for that was to be forgotten")
                    for receiver, direction, stage, make in (
                        (event.input_to, "input", 0, input_of),
                        (event.labels_to, "labels", len(plan.stages) - 1, label_of),
                    ):
                        if receiver is not None:
                            header = header_of(event.step, event.microbatch, stage, direction, event.train)
                            draft = Draft(header, make(event.microbatch, event.train))
                            yield receiver, self.signed(draft, self.feeder.plan_hash, event.attempt)
        self.feeder.events.clear()

    def signed(self, draft: Draft, plan: bytes, attempt: int) -> OpenedFrame:
        """Open a frame as its receiver does."""
        old = draft.header
        header = FrameHeader(
            plan,
            old.step,
            attempt,
            old.microbatch,
            old.stage,
            old.direction,
            old.train,
            old.sizes,
            old.tensors,
            old.codec,
            old.digest,
        )
        data = draft.data
        if self.spoils:
            self.spoils -= 1
            data = SPOILED
        return opened(self.me, header, data)

    def wired(self, message: Any) -> Any:
        """Return a message as decoded from the wire; None if its plan is over for this machine."""
        if not isinstance(message, Outgoing):
            return message
        if self.replica is None or message.plan != self.replica.plan_hash:
            return None
        assert isinstance(message.frame, Draft)
        return self.signed(message.frame, message.plan, message.attempt)

    # Computing

    def begin(self, now: float) -> bool:
        """Ask for work if the stage is idle. Return whether there is some."""
        if self.work is None and self.replica is not None:
            self.work = self.replica.next(now)
            self._check_order()
        return self.work is not None

    def _check_order(self) -> None:
        """Return whether this message may arrive now."""
        stage, replica, work = self.stage, self.replica, self.work
        if work is None or replica is None:
            return
        if replica.next(0.0) is not None:
            raise Broken("two things to do at once")
        match work:
            case ForwardReady(train=True):
                if not stage.is_last and len(stage.in_flight) >= replica.in_flight_max:
                    raise Broken(f"{len(stage.in_flight) + 1} micro-batches are in flight")
            case ReduceReady():
                if stage.in_flight:
                    raise Broken("a reduction while something is between its two passes")
            case SaveReady():
                if stage.step != work.step or self.is_corrupt:
                    raise Broken(f"a copy of step {work.step} of a stage that is at {stage.step}")

    def compute(self) -> Sends:
        """Do everything that needs no other member, and report it."""
        work, replica, stage = self.work, self.replica, self.stage
        assert replica is not None
        self.work = None
        if (refused := self._refused(work)) is not None:
            return refused
        match work:
            case ForwardReady():
                return self._forward(work)
            case BackwardReady():
                back = stage.backward(work.step, work.microbatch, bytes(work.gradient.data))
                self.counted += 1
                return replica.backwarded(work, gradient=self._draft(work, back, -1, "gradient", True))
            case SubtractReady():
                after = work.labels if stage.is_last else work.gradient
                given, data = bytes(work.input.data), None if after is None else bytes(after.data)
                stage.remove(work.microbatch, given, data)
                return replica.removed(work)
            case ForgetReady():
                stage.forget(work.microbatch)
                return replica.forgotten(work)
            case ApplyReady():
                self.has_reported = False
                parameters = stage.apply(work.step, work.samples, work.squared_norm)
                # If two differ, neither can be proved wrong, so the first one in the plan is believed.
                corrupts = self.corrupts_next and replica.plan.stages[stage.index].replicas[0] != self.me
                self.corrupts_next = False
                if corrupts:
                    self.is_corrupt = True
                    parameters = stage.parameters = digest("a bit has turned", self.me, parameters)
                spent = Work(MICROBATCH_NANOSECONDS * self.counted)
                self.counted = 0
                return replica.applied(work, parameters, spent)
            case StepDiscarded():
                self.has_reported = False
                stage.discard()
                return replica.discarded(work)
        raise Broken(f"nobody knows what to do with {work}")

    def _refused(self, work: WorkItem) -> Sends | None:
        """Return why the stage cannot use its input, or claims so; None if it can."""
        assert self.replica is not None
        if not isinstance(work, ForwardReady | BackwardReady):
            return None
        given: dict[Direction, Payload | None] = {}
        if isinstance(work, ForwardReady):
            given = {"input": work.input, "labels": work.labels if self.stage.is_last else None}
        else:
            given = {"gradient": work.gradient}
        for direction, part in given.items():
            if part is not None and part.data == SPOILED:
                return self.replica.refused(work, direction, "a digest that does not fit")
        if self.accuses:
            self.accuses -= 1
            return self.replica.refused(work, next(iter(given)), "I say so")
        return None

    def filled(self, parameters: bytes) -> Sends:
        """Adopt the fetched state."""
        work, replica = self.work, self.replica
        assert isinstance(work, FillReady)
        assert replica is not None
        self.work, self.is_corrupt = None, False
        self.stage.fill(work.step, parameters)
        self.has_reported = False
        return replica.filled(work, parameters)

    def reduced(self, key: Key, total: dict[int, int]) -> Sends:
        """End an all-reduce at this machine."""
        work, replica, stage = self.work, self.replica, self.stage
        if not isinstance(work, ReduceReady) or key[:3] != (work.plan, work.step, work.attempt):
            return []  # a reduction that was void before it ended
        assert replica is not None
        if key[3] == ALL_STAGES:
            stage.tied_total = total
        else:
            stage.total = total
        if stage.total is None or stage.tied_total is None:
            return []
        self.work = None
        self.has_reported = True
        name = digest(sorted(stage.total.items()), sorted(stage.tied_total.items()))
        if self.wrong_digests:
            self.wrong_digests -= 1
            name = digest("wrong", name, self.me)
        return replica.reduced(work, name, stage.squared_norm)

    def take_voids(self) -> list[ReduceVoided]:
        """Return the work items that the core has voided."""
        assert self.replica is not None
        voided = []
        for event in self.replica.events:
            match event:
                case ReduceVoided():
                    if not isinstance(self.work, ReduceReady):
                        raise Broken("a reduction is void that is not under way")
                    voided.append(event)
                    self.work = None
                case FillVoided():
                    if not isinstance(self.work, FillReady):
                        raise Broken("a filling is void that is not under way")
                    self.work = None
                case ReduceAsked():
                    if not isinstance(self.work, ReduceReady):
                        raise Broken("one is asked for a reduction that is not under way")
                    self.asked.append(event)
        self.replica.events.clear()
        return voided

    def _forward(self, work: ForwardReady) -> Sends:
        assert self.replica is not None
        labels = None if work.labels is None else bytes(work.labels.data)
        output, gradient, numbers = self.stage.forward(
            work.step, work.microbatch, work.train, bytes(work.input.data), labels
        )
        last = self.stage.is_last
        self.counted += work.train and not self.stage.awaits_gradient
        return self.replica.forwarded(
            work,
            output=self._draft(work, output, +1, "input", work.train),
            gradient=self._draft(work, gradient, -1, "gradient", True),
            samples=samples_of(work.microbatch),
            loss=loss_of(numbers) if last else 0.0,
            metrics=metrics_of(numbers, work.microbatch) if last else (),
        )

    @property
    def reachable(self) -> set[int]:
        """The step that its stage may have completed: either now, or by the total that it has reported."""
        if self.replica is None or self.replica.step is None:
            return set()
        return {self.stage.step, self.stage.step + self.has_reported}

    def mend(self, parameters: list[list[bytes]]) -> None:
        """Flip the changed bit back."""
        assert self.replica is not None
        self.is_corrupt = False
        self.stage.parameters = self.replica._digest = parameters[self.stage.step][self.stage.index]

    def _draft(
        self,
        work: ForwardReady | BackwardReady,
        data: bytes | None,
        towards: int,
        direction: Direction,
        train: bool,
    ) -> Draft | None:
        if data is None:
            return None
        return Draft(
            header_of(work.step, work.microbatch, self.stage.index + towards, direction, train), data
        )

    @property
    def is_bounded(self) -> bool:
        """Return whether nothing of a step is kept after it."""
        replica = self.replica
        assert replica is not None
        return not replica._kept and not replica._order.microbatches and not replica._order.counted


def header_of(step: int, microbatch: int, stage: int, direction: Any, train: bool) -> FrameHeader:
    return FrameHeader(NO_HASH, step, 0, microbatch, stage, direction, train, (1,), (), "raw", NO_HASH)


def opened(author: PeerId, header: FrameHeader, data: bytes = b"x") -> OpenedFrame:
    """Return a frame as `open_frame` hands it over."""
    return OpenedFrame(author, header, payload(data), Fact(author, encode(header), b"no signature"))
