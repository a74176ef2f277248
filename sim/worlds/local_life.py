"""One life of a simulated peer (from a start to the next stop) in a run in local mode: the base class of all
its parts.

It has the surroundings, the crew, and the core for the end of the run. The other parts build on it and on one
another: `local_holder`, `local_column`, `local_ending`, `local_member`.
"""

from collections.abc import Callable, Collection
from typing import Any

from crypto.identity import PeerId
from gossip.member import Status
from partition.run.admission import Admission
from partition.run.conclusions import PROTOCOL as LOCAL
from partition.run.ending import Ending
from partition.run.local.courses import ColumnBroken, Course, Sleep
from partition.run.local.crew import MemberCrew
from partition.run.local.holder import StageHolder
from partition.run.local.member_ending import MemberEnding
from partition.run.local.seat import StageSeat
from sim.worlds.life import Life
from sim.worlds.local_context import Beginning, RunSurroundings
from sim.worlds.local_stage import LocalStage
from sim.worlds.tasks import Task, Tasks, Wait

LOOK_SECONDS = 0.5


class HeldPlace:
    """A stage that works for heads."""

    def __init__(self, stage: LocalStage, *, is_further: bool) -> None:
        self.stage = stage
        member = stage.member
        self.rules = StageHolder(stage, stage.number, member.ending, member.finish, is_further=is_further)
        self.is_ready = False


class SimulatedCrew(MemberCrew):
    """The crew of one simulated member."""

    further: dict[int, HeldPlace]
    """The additional stages of the member, by number."""

    @property
    def further_seats(self) -> list[StageSeat]:
        return [place.rules.seat for place in self.further.values()]


class LocalLife:
    """The base class of a member."""

    def __init__(
        self,
        run: RunSurroundings,
        life: Life,
        begin: Beginning,
        ending: Ending | None = None,
        admission: Admission | None = None,
    ) -> None:
        """`ending` and `admission` are taken over from this peer's previous life in the run, as a holder."""
        self.run = run
        self.life = life
        self.me = life.peer
        self.stage = begin.stage
        self.rng = run.rng(self.me)
        self.is_opened = ending is not None
        self.ending = ending or Ending(self.me, run.name, run.settings, run.training.steps, run.requester)
        wall = run.wall(self.me)
        self.admission = admission or Admission(life.signer, run.name, run.requester, begin.chain, wall=wall)
        self.tasks = Tasks(lambda action: run.when_awake(self.me, action))
        self.disk = run.disk(self.me)
        self.begin = begin
        self.own = LocalStage(self, begin.stage)
        self.own.carried = (begin.carried or {}).get(begin.stage, self.disk.own)
        self.crew = SimulatedCrew(
            self.me,
            self.ending,
            replicas=run.training.replicas,
            is_training=begin.is_training,
            reports=lambda: self.own.rostered,
            admitted=lambda: self.admission.admitted,
        )
        self.crew.further = {}
        self.finish = MemberEnding(
            run.name,
            run.settings,
            self.crew,
            requester=run.requester,
            stage=begin.stage,
            stages=run.training.stages,
            tell=self._tell,
            now=lambda: self.now,
            live=self.live,
        )

    @property
    def now(self) -> float:
        return self.run.local_now(self.me)

    def sleep(self, seconds: float) -> Wait:
        return lambda resume: self.run.sleep(seconds, resume)

    def ask(self, peer: PeerId, question: tuple[Any, ...], seconds: float) -> Wait:
        """Send a request to the member on a different peer; the answer is None if there is none."""
        return lambda resume: self.run.ask(self.me, peer, question, seconds, resume)

    def command(self, protocol: str, order: Callable[[Any, float], Any]) -> None:
        self.run.command(self.life, protocol, order)

    def _tell(self, order: Callable[[float], Any]) -> None:
        """Act on the core for the end of the run."""
        ending = self.ending
        self.command(LOCAL, lambda core, now: core.drained(ending, order(now)))

    def _admit(self, order: Callable[[float], Any]) -> None:
        admission = self.admission
        self.command(LOCAL, lambda core, now: core.admitted(admission, order(now)))

    def greet(self, peers: Collection[PeerId]) -> None:
        """Show this member's chain of tickets to peers."""
        self._admit(lambda _: self.admission.greet(peers))

    def live(self) -> list[PeerId]:
        statuses = self.life.swim.statuses
        alive = (Status.ALIVE, Status.SUSPECT)
        return [peer for peer in self.run.pool if peer == self.me or statuses.get(peer) in alive]

    def offered(self) -> list[PeerId]:
        return self.live()

    def preferred(self) -> list[PeerId]:
        return [peer for peer in self.live() if self.run.has_slot(peer)]

    def follow(self, course: Course[Any], do: Callable[[Any], Task]) -> Task:
        """Follow a course to its end, carrying out each of its commands by `do`; return its result."""
        answer, broken = None, None
        while True:
            try:
                deed = course.send(answer) if broken is None else course.throw(broken)
            except StopIteration as over:
                return over.value
            answer = broken = None
            if isinstance(deed, Sleep):
                yield self.sleep(deed.seconds)
                continue
            try:
                answer = yield from do(deed)
            except ColumnBroken as error:
                broken = error

    def keep(self, stage: LocalStage) -> None:
        """Save the state of a held stage."""
        if stage is self.own:
            self.disk.own = stage.state
        else:
            self.disk.copies[stage.number] = stage.state
        self._remember()

    def _remember(self) -> None:
        disk = self.disk
        disk.stage, disk.is_training, disk.is_saved = self.stage, self.crew.is_training, True
        disk.chain, disk.members = self.admission.chain, tuple(self.admission.admitted)
