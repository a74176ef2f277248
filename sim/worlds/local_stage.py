"""A stage of a run in local mode that a simulated peer holds: counted steps in place of numbers.

Its roster, its rounds and the state that it goes on from are by the cores that nodes have; the arithmetic of
a round is not, so that a mean is a count.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from random import Random
from typing import Any, Protocol

from blake3 import blake3

from crypto.identity import PeerId
from gossip.claims import lower_median
from gossip.newcomers import LIKELY_ROUNDS, is_another_further, likely_steps
from gossip.roster import PROTOCOL as ROSTER
from gossip.roster import Report, Roster
from gossip.rosters import Rosters
from partition.run.admission import Admission
from partition.run.ending import Ending
from partition.run.local.member_stage import MemberStage, StageCounts
from partition.run.local.reports import is_begun, training
from partition.run.local.round_schedule import RoundSchedule
from sim.worlds.local_context import CountedState, RunSurroundings
from sim.worlds.local_rounds import RoundTurn
from sim.worlds.tasks import Task, Tasks, Wait

CATCH_UPS_MAX = 5
FETCH_SECONDS = 30.0


class LocalStageOwner(Protocol):
    """The member that holds a stage."""

    run: RunSurroundings
    me: PeerId
    rng: Random
    ending: Ending
    admission: Admission
    tasks: Tasks

    @property
    def now(self) -> float: ...
    def live(self) -> Collection[PeerId]: ...
    def sleep(self, seconds: float) -> Wait: ...
    def ask(self, peer: PeerId, question: tuple[Any, ...], seconds: float) -> Wait: ...
    def command(self, protocol: str, order: Callable[[Any, float], Any]) -> None: ...


def roster_name(run: bytes, stage: int) -> bytes:
    """Return the name under which the holders of a stage average."""
    return blake3(run + stage.to_bytes(2, "big")).digest()


class LocalStage(MemberStage):
    """One stage of one member. It is in the roster of that stage from the beginning on."""

    def __init__(self, member: LocalStageOwner, number: int) -> None:
        rounds = RoundSchedule(member.run.settings, needs_all=False)
        super().__init__(
            StageCounts(member.run.training.steps),
            rounds,
            member.ending,
            reports=lambda: self.reports,
            now=lambda: member.now,
        )
        self.member = member
        self.number = number
        self.roster: Roster | None = None
        self._made: tuple[bool, int] | None = None

    def enter(self) -> None:
        """Take part in the roster of this stage."""
        member, name = self.member, roster_name(self.member.run.name, self.number)

        def order(core: Rosters, now: float) -> list[tuple[PeerId, object]]:
            number = int(1000 * member.run.wall(member.me))  # above those of earlier lives
            admits = member.admission.admits
            self.roster = roster = core.open(name, name, now, number, admits)
            return [*roster.introduce(now, member.live())]

        member.command(ROSTER, order)
        self.rounds.open(member.now)

    def leave(self) -> None:
        """Take part no more."""
        name = roster_name(self.member.run.name, self.number)
        self.roster, self.has_state = None, False
        self.member.command(ROSTER, lambda core, _: core.close(name))

    def introduce(self) -> None:
        """Greet the members of the swarm, as nodes do now and then."""
        if (roster := self.roster) is not None:
            live = self.member.live()
            self.member.command(ROSTER, lambda _, now: roster.introduce(now, live))

    @property
    def reports(self) -> Mapping[PeerId, Report]:
        return {} if self.roster is None else self.roster.reports

    @property
    def state(self) -> CountedState:
        return CountedState(self.step, self.counts.samples, self.rounds.count)

    def report(self) -> None:
        """Tell the others how far this stage is."""
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

    # Where it goes on from

    def take(self, state: CountedState) -> None:
        """Go on from a state."""
        self.counts.step, self.counts.samples = state.step, state.samples
        self._made = None
        self.rounds.take_over(self.member.now, state.rounds, self.step, self.counts.samples)

    def begin(self, carried: CountedState | None) -> Task:
        """Go on from the state of the others, or from the last one here where nobody is further; return
        whether there is one to go on from."""
        reports, local_steps = self.reports, self.member.run.settings.local_steps
        if carried is not None:
            self.take(carried)
            is_needed = is_another_further(reports, self.step, local_steps)
        else:
            is_needed = is_begun(reports)
        is_found = True
        if is_needed:
            is_found = yield from self.catch_up()
        return is_found or carried is not None

    def catch_up(self) -> Task:
        """Take over the state of others; return whether one was, or nobody has one any more."""
        local_steps = self.member.run.settings.local_steps
        for _ in range(CATCH_UPS_MAX):
            reports = self.reports
            if not training(reports):
                return True
            likely = likely_steps(reports, local_steps)
            found = yield from self.fetch(likely.first, likely.last)
            if found is not None:
                made = [report.rounds for report in reports.values() if report.has_state]
                rounds = min(found.rounds, lower_median(made) + LIKELY_ROUNDS)
                self.take(CountedState(found.step, found.samples, rounds))
                return True
            yield self.member.sleep(1.0)
        return False

    def fetch(self, first: int, last: int) -> Task:
        """Return the state of a member that is at one of these steps, None where none hands it over."""
        reports = self.reports.items()
        donors = [
            peer for peer, report in reports if report.has_state and report.step.is_between(first, last)
        ]
        if not donors:
            return None
        donor = self.member.rng.choice(sorted(donors))
        return (yield self.member.ask(donor, ("state", self.number, first), FETCH_SECONDS))

    # Between two steps

    def between(self, *, is_still: bool) -> None:
        """Use a round that is over, and begin the next unless the numbers are to be `is_still`."""
        now, rounds = self.member.now, self.rounds
        self.report()
        if self._made is not None:
            (is_mean, members), self._made = self._made, None
            rounds.use()
            if is_mean:
                rounds.averaged(is_included=True)
                self.member.run.averaged(self.member.me, self.number, members)
            else:
                rounds.failed()
        self.note_end()
        if is_still or not rounds.is_due(self.step, is_idle=self.counts.is_idle):
            return
        if not self.training:
            rounds.skip(now, self.step, self.counts.samples)
            return
        window = rounds.begin(now, self.step, self.counts.samples)
        life = rounds.life

        def over(members: int) -> None:
            if rounds.ended(life, has_result=True):
                self._made = members > 1, members

        member = self.member
        turn = RoundTurn(member.me, window, lambda: self.training, lambda: member.tasks.is_over, over)
        member.run.rounds.want(self.number, turn)
