"""A simulated peer's stage of a run in local mode, with a number of steps instead of parameters.

Its roster, its rounds and the choice of its state use the cores of nodes. A round does no arithmetic, so a
mean is only counted.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, Protocol

from blake3 import blake3

from crypto.identity import PeerId
from gossip.newcomers import is_another_further, likely_rounds, likely_steps
from gossip.roster import PROTOCOL as ROSTER
from gossip.roster import Report, Roster
from gossip.rosters import Rosters
from partition.run.admission import Admission
from partition.run.ending import Ending
from partition.run.local.keeping import CopySchedule
from partition.run.local.member_ending import MemberEnding
from partition.run.local.member_stage import (
    BeginRound,
    HandOn,
    KeepState,
    LookFurther,
    MemberStage,
    NoteOwnState,
    NotTaken,
    ReportStage,
    RestoreOwnState,
    Resume,
    StageCounts,
    TryState,
    UseRound,
)
from partition.run.local.round_schedule import RoundSchedule
from sim.worlds.local_context import CountedState, RunSurroundings
from sim.worlds.local_rounds import RoundTurn
from sim.worlds.tasks import Task, Tasks, Wait

FETCH_SECONDS = 30.0


class LocalStageOwner(Protocol):
    """The member that holds a stage."""

    run: RunSurroundings
    me: PeerId
    rng: Random
    ending: Ending
    finish: MemberEnding
    admission: Admission
    tasks: Tasks

    @property
    def now(self) -> float: ...
    def live(self) -> Collection[PeerId]: ...
    def keep(self, stage: "LocalStage") -> None: ...
    def sleep(self, seconds: float) -> Wait: ...
    def ask(self, peer: PeerId, question: tuple[Any, ...], seconds: float) -> Wait: ...
    def command(self, protocol: str, order: Callable[[Any, float], Any]) -> None: ...


def roster_name(run: bytes, stage: int) -> bytes:
    """Return the name under which the holders of a stage average."""
    return blake3(run + stage.to_bytes(2, "big")).digest()


class LocalStage(MemberStage):
    """One stage of one member; it is in the roster of that stage from the start."""

    def __init__(self, member: LocalStageOwner, number: int) -> None:
        rounds = RoundSchedule(member.run.settings, needs_all=False)
        super().__init__(
            StageCounts(member.run.training.steps),
            rounds,
            member.ending,
            saves=CopySchedule(member.run.training.save_every),
            reports=lambda: self.rostered,
            now=lambda: member.now,
        )
        self.member = member
        self.number = number
        self.taken_over: Callable[[], None] = lambda: None
        """Called when the state was taken over from other members."""
        self.carried: CountedState | None = None
        """The state to resume from."""
        self.roster: Roster | None = None
        self._made: tuple[bool, int] | None = None

    def enter(self) -> None:
        """Join the roster of this stage."""
        member, name = self.member, roster_name(self.member.run.name, self.number)

        def order(core: Rosters, now: float) -> list[tuple[PeerId, object]]:
            number = int(1000 * member.run.wall(member.me))  # above the numbers used before a restart
            admits = member.admission.admits
            self.roster = roster = core.open(name, name, now, number, admits)
            return [*roster.introduce(now, member.live())]

        member.command(ROSTER, order)
        self.rounds.open(member.now)

    def leave(self) -> None:
        """Leave the roster."""
        name = roster_name(self.member.run.name, self.number)
        self.roster, self.has_state = None, False
        self.member.command(ROSTER, lambda core, _: core.close(name))

    def introduce(self) -> None:
        """Greet the members of the swarm, as nodes do periodically."""
        if (roster := self.roster) is not None:
            live = self.member.live()
            self.member.command(ROSTER, lambda _, now: roster.introduce(now, live))

    @property
    def rostered(self) -> Mapping[PeerId, Report]:
        return {} if self.roster is None else self.roster.reports

    @property
    def state(self) -> CountedState:
        return CountedState(self.step, self.counts.samples, self.rounds.count)

    def report(self) -> None:
        """Report this stage's progress to the others."""
        if (roster := self.roster) is not None:
            tell = partial(
                roster.tell,
                step=self.step,
                samples=self.counts.samples,
                rounds=self.rounds.count,
                lineage=self.member.run.name,
                has_state=self.has_state,
            )
            self.member.command(ROSTER, lambda _, now: tell(now))

    # Resuming

    def take(self, state: CountedState) -> None:
        """Resume from a state."""
        self.counts.step, self.counts.samples = state.step, state.samples
        self._made = None
        self.rounds.take_over(self.member.now, state.rounds, self.step, self.counts.samples)
        self.taken_over()

    def do(self, deed: object) -> Task:
        """Carry out a command for this stage."""
        match deed:
            case Resume():
                if self.carried is not None:
                    self.take(self.carried)
                return self.carried is not None
            case LookFurther():
                return is_another_further(self.rostered, self.step, self.member.run.settings.local_steps)
            case TryState(passed_over=passed_over):
                return (yield from self._try_state(passed_over))
            case NoteOwnState() | RestoreOwnState():
                pass  # an unusable state is refused before anything changes
            case ReportStage():
                self.report()
            case UseRound():
                self._use()
            case BeginRound():
                self._begin_round()
            case KeepState():
                self.member.keep(self)
            case HandOn():
                pass  # requests are answered at any time
        return None

    def _try_state(self, passed_over: Collection[PeerId]) -> Task:
        """Take over a state from another member. Return None, or why no state was taken over."""
        donor, found = yield from self.fetch_likely(passed_over)
        if found is None:
            return NotTaken("no member handed over its state")
        if found.step > self.counts.steps:
            return NotTaken("the state of others has a step that the run does not have", (donor,))
        self.take(replace(found, rounds=likely_rounds(self.rostered, found.rounds)))
        return None

    def fetch_likely(self, passed_over: Collection[PeerId] = ()) -> Task:
        """Return a donor and its state from a likely step; None if no member hands one over."""
        likely = likely_steps(self.rostered, self.member.run.settings.local_steps, passed_over)
        return (yield from self.fetch(likely.first, likely.last, passed_over))

    def fetch(self, first: int, last: int, passed_over: Collection[PeerId] = ()) -> Task:
        """Return a donor and its state from one of these steps; None if no member hands one over."""
        reports = self.rostered.items()
        donors = [
            peer
            for peer, report in reports
            if report.has_state and report.step.is_between(first, last) and peer not in passed_over
        ]
        if not donors:
            return None, None
        donor = self.member.rng.choice(sorted(donors))
        return donor, (yield self.member.ask(donor, ("state", self.number, first), FETCH_SECONDS))

    # Rounds

    def _use(self) -> None:
        if self._made is None:
            return
        (is_mean, members), self._made = self._made, None
        self.rounds.use()
        if is_mean:
            self.rounds.averaged(is_included=True)
            self.member.run.averaged(self.member.me, self.number, members)
        else:
            self.rounds.failed()

    def _begin_round(self) -> None:
        rounds = self.rounds
        window = rounds.begin(self.now(), self.step, self.counts.samples)
        life = rounds.life

        def over(members: int) -> None:
            if rounds.ended(life, has_result=True):
                self._made = members > 1, members

        member = self.member
        turn = RoundTurn(member.me, window, lambda: self.training, lambda: member.tasks.is_over, over)
        member.run.rounds.want(self.number, turn)
