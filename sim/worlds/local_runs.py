"""The runs in local mode of a world of cores: the real rules of every member, with the number of steps as the
state.

The members' agreement on the end, their tickets and their rosters are cores on the engine. Tasks drive the
rules of `partition.run.local` (`sim.worlds.local_member`). Outcomes are checked: `Broken` is raised if a
stage works for two heads, or if a step is counted that some stage has not made.

Not here: models, and the arithmetic of averaging. Members that want a round at the same time and reach each
other get the mean.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any

from crypto.identity import PeerId
from gossip.member import MemberDown, MemberLeft
from gossip.roster import PROTOCOL as ROSTER
from gossip.rosters import Rosters
from node.seams import own_rng
from partition.run.admission import Admission, PeerAdmitted
from partition.run.conclusions import PROTOCOL as LOCAL
from partition.run.conclusions import Conclusion, EvaluationHeard, Preferred, Settled
from partition.run.ending import Ending
from partition.run.endings import Endings
from partition.run.local_settings import LocalSettings
from sim.events import ColumnStepped, LocalRunEnded, PeerStarted, PeerStopped, StageAveraged
from sim.network.instants import after
from sim.scenario.model import LocalTraining
from sim.seams import EPOCH_SECONDS
from sim.seeds import draw, seeded_rng
from sim.worlds.life import Life
from sim.worlds.local_context import Attachment, Beginning, CountedState, LocalDisk
from sim.worlds.local_member import SimulatedMember
from sim.worlds.local_rounds import RoundTable
from sim.worlds.local_truth import LocalTruth
from sim.worlds.served import StreamLines
from sim.worlds.streams import Streams
from sim.worlds.training import RunsGround, TrainingRuns

COLUMN = "/peerloom/column/1"
MESSAGE_BYTES = 200
AGAIN_SECONDS = 1.0
RUN_BYTES = 32


class LocalModeRuns:
    """All runs in local mode of a scenario in one world."""

    def __init__(self, ground: RunsGround, runs: TrainingRuns) -> None:
        self.counters: Counter[str] = Counter()
        self._runs: list[LocalRun] = []
        self._ground = ground
        first, peers = 0, ground.peers
        for number, training in enumerate(ground.scenario.local_runs):
            pool = tuple(
                peers[(first + place) % len(peers)] for place in range(min(training.members, len(peers)))
            )
            first += len(pool)
            self._runs.append(LocalRun(self, ground, runs, training, number, pool))
        if self._runs:
            ground.on(PeerStarted, self._started)
            ground.on(PeerStopped, self._stopped)
            for lost in (MemberDown, MemberLeft):
                ground.on(lost, self._lost)
            for kind in (Preferred, Settled, EvaluationHeard, PeerAdmitted):
                ground.on(kind, self._learnt)

    def network_changed(self) -> None:
        """React to a change in which peers reach each other."""
        for run in self._runs:
            run.network_changed()

    def standing(self, number: int) -> Mapping[PeerId, str]:
        """Return a text about the state of each member of a run, to find out why the run hangs."""
        return self._runs[number].standing

    def working(self, number: int) -> Mapping[int, Sequence[PeerId]]:
        """Return the members that have a state, by stage."""
        return self._runs[number].working

    def _of(self, peer: PeerId) -> list["LocalRun"]:
        return [run for run in self._runs if peer in run.pool]

    def _started(self, life: Life, event: PeerStarted) -> None:
        if self._of(life.peer):
            rng = seeded_rng(self._ground.seed, "local rosters", life.peer, life.serial)
            self._ground.host(life, Endings(), LOCAL)
            self._ground.host(life, Rosters(life.peer, own_rng(rng)), ROSTER)
        for run in self._of(life.peer):
            self._ground.at(self._ground.now, run.started, life, event.remembers)

    def _stopped(self, life: Life, _event: PeerStopped) -> None:
        for run in self._of(life.peer):
            run.stopped(life.peer)

    def _lost(self, life: Life, event: MemberDown | MemberLeft) -> None:
        if self._of(life.peer):
            self._ground.command(life, ROSTER, lambda core, _: core.lost(event.peer))

    def _learnt(self, life: Life, event: Any) -> None:
        for run in self._of(life.peer):
            if run.name == event.run:
                run.learnt(life.peer, event)


class LocalRun:
    """One run: its members and their shared state."""

    def __init__(
        self,
        runs: LocalModeRuns,
        ground: RunsGround,
        lines: TrainingRuns,
        training: LocalTraining,
        number: int,
        pool: tuple[PeerId, ...],
    ) -> None:
        self.training = training
        self.pool = pool
        self.requester = pool[0]
        self.name = draw(ground.seed, "local run", number)[:RUN_BYTES]
        self.settings = LocalSettings(local_steps=training.local_steps, patience=training.patience)
        self.attachments: set[Attachment] = set()
        self.truth = LocalTruth(training.stages)
        self.rounds = RoundTable(lambda: self.now, self.sleep, lines.connected)
        self._runs = runs
        self._ground = ground
        self._lines = lines
        self._number = number
        self._members: dict[PeerId, SimulatedMember] = {}
        self._disks: dict[PeerId, LocalDisk] = {}
        self._over: set[PeerId] = set()
        self._lives: Counter[PeerId] = Counter()
        self._has_begun = False
        self._streams = Streams(
            StreamLines(lines, ground, runs.counters, COLUMN), ground.seed, lambda *_: None, lambda *_: None
        )
        ground.at(training.at_seconds, self._begin)

    # The beginning

    def _begin(self) -> None:
        life = self._ground.lives.get(self.requester)
        if life is None:
            self._ground.at(after(self.now, AGAIN_SECONDS), self._begin)
            return
        self._has_begun = True
        self._make(life, Beginning())

    def _make(
        self,
        life: Life,
        begin: Beginning,
        ending: Ending | None = None,
        admission: Admission | None = None,
    ) -> None:
        self._lives[life.peer] += 1
        member = self._members[life.peer] = SimulatedMember(self, life, begin, ending, admission)
        member.open()

    def started(self, life: Life, remembers: bool) -> None:
        """Take part again if the peer's disk shows that it took part before."""
        disk = self._disks.get(life.peer)
        if self._ground.lives.get(life.peer) is not life:
            return
        self._streams.changed()
        if not remembers or disk is None or not disk.is_saved:
            self._disks.pop(life.peer, None)
            if life.peer == self.requester and self._has_begun:
                self._over.add(life.peer)  # no other peer requests the run again
            return
        if life.peer not in self._over and life.peer not in self._members:
            begin = Beginning(disk.stage, disk.is_training, disk.chain, is_resumed=True, known=disk.members)
            self._make(life, begin)

    def stopped(self, peer: PeerId) -> None:
        member = self._members.pop(peer, None)
        if member is not None:
            member.tasks.is_over = True
        for attachment in [each for each in self.attachments if peer in (each.head, each.holder)]:
            attachment.end()
        self._streams.stopped(peer)

    def network_changed(self) -> None:
        for attachment in list(self.attachments):
            if not self._lines.connected(attachment.head, attachment.holder):
                attachment.end()
        self._streams.changed()

    def detached(self, attachment: Attachment) -> None:
        if attachment in self.attachments:
            self.attachments.discard(attachment)
            self.truth.leave(attachment.holder, attachment.stage)
        head, holder = self._members.get(attachment.head), self._members.get(attachment.holder)
        if head is not None:
            head.detached(attachment)
        if holder is not None:
            holder.holder_detached(attachment)

    # For the members

    @property
    def now(self) -> float:
        return self._ground.now

    def local_now(self, peer: PeerId) -> float:
        return self._ground.local_now(peer)

    def wall(self, peer: PeerId) -> float:
        return EPOCH_SECONDS + self.local_now(peer)

    def rng(self, peer: PeerId) -> Random:
        return seeded_rng(self._ground.seed, "local", self._number, peer, self._lives[peer])

    def disk(self, peer: PeerId) -> LocalDisk:
        return self._disks.setdefault(peer, LocalDisk())

    def sleep(self, seconds: float, resume: Callable[[Any], None]) -> None:
        self._ground.at(after(self.now, seconds), resume, None)

    def when_awake(self, peer: PeerId, action: Callable[[], None]) -> None:
        thaws = self._lines.thaws(peer)
        if thaws > self.now:
            self._ground.at(thaws, lambda: self.when_awake(peer, action))
        else:
            action()

    def slowness(self, peer: PeerId) -> float:
        return self._lines.slowness(peer)

    def command(self, life: Life, protocol: str, order: Callable[[Any, float], Any]) -> None:
        self._ground.command(life, protocol, order)

    def has_slot(self, peer: PeerId) -> bool:
        """Return whether a peer offers its slot. Other peers learn this immediately."""
        member = self._members.get(peer)
        is_used = member is not None and member.crew.is_training
        return peer in self._ground.lives and not is_used and peer not in self._over

    def is_gone(self, peer: PeerId) -> bool:
        """Return whether a peer's host reports that no process listens there."""
        return peer not in self._ground.lives

    def loss(self, step: int) -> float:
        """Return the held-out loss at `step`, which improves over the first half of the run."""
        return 1.0 - min(step, self.training.steps // 2) / self.training.steps

    def ask(
        self,
        asker: PeerId,
        peer: PeerId,
        question: tuple[Any, ...],
        seconds: float,
        done: Callable[[Any], None],
    ) -> None:
        put = partial(self._put, asker, peer, question)
        self._streams.ask(asker, peer, MESSAGE_BYTES, seconds, put, done)

    def _put(
        self, asker: PeerId, peer: PeerId, question: tuple[Any, ...], answer: Callable[[Any], None]
    ) -> None:
        member, life = self._members.get(peer), self._ground.lives.get(peer)
        if member is not None:
            member.answer(asker, question, answer)
        elif question[0] == "join" and life is not None and self.has_slot(peer):
            _, chain, stage, _ = question
            self._make(life, Beginning(stage, True, chain, asker))
            answer(True)
        elif question[0] == "join" and life is not None:
            answer(False)
        elif question[0] == "attach":
            answer(("refusal", [], False))
        else:
            answer(None)

    def succeed(self, peer: PeerId, carried: Mapping[int, CountedState]) -> None:
        """Begin a holder's next part in the run, now as the head of its column."""
        member, disk = self._members[peer], self.disk(peer)
        member.close()
        disk.own, disk.stage = carried[0], 0
        begin = Beginning(carried=carried)
        self._ground.at(self.now, self._make, member.life, begin, member.ending, member.admission)

    # Outcomes of members

    def learnt(self, peer: PeerId, event: Any) -> None:
        member = self._members.get(peer)
        if member is None:
            return
        match event:
            case Preferred():
                self._ground.at(self.now, member.preferred_changed, event.conclusion)
            case Settled():
                self._ground.at(self.now, self._end, member, event.conclusion)
            case EvaluationHeard():
                member.finish.schedule.evaluated(member.own.step)
            case PeerAdmitted():
                self._ground.at(self.now, member.admitted, event.peer)

    def _end(self, member: SimulatedMember, found: Conclusion) -> None:
        if self._members.get(member.me) is not member:
            return
        member.close()
        del self._members[member.me]
        self._over.add(member.me)
        self._disks.pop(member.me, None)
        self._tell(member, LocalRunEnded(self.name, found.outcome, found.reason, found.weights))

    def left(self, peer: PeerId, reason: str) -> None:
        """Record that a member cannot continue, while the others do."""
        member, name = self._members.pop(peer), self.name
        member.close()
        self._disks.pop(peer, None)
        self.command(member.life, LOCAL, lambda core, _: core.close(name) or [])
        self._tell(member, LocalRunEnded(self.name, "left", reason, ""))

    def counted(self, head: PeerId, step: int, holders: Sequence[PeerId]) -> None:
        """Record that a head has made a step with these holders of the other stages."""
        self._tell(self._members[head], ColumnStepped(self.name, step, tuple(holders)))

    def averaged(self, peer: PeerId, stage: int, members: int) -> None:
        """Record that a stage became the mean of `members` members."""
        self._tell(self._members[peer], StageAveraged(self.name, stage, members))

    def _tell(self, member: SimulatedMember, event: object) -> None:
        self._ground.tell(member.life, event)

    @property
    def standing(self) -> Mapping[PeerId, str]:
        return {peer: standing_of(member) for peer, member in sorted(self._members.items())}

    @property
    def working(self) -> Mapping[int, Sequence[PeerId]]:
        found: dict[int, list[PeerId]] = {}
        for peer, member in sorted(self._members.items()):
            for stage in (member.own, *(each.stage for each in member.crew.further.values())):
                if stage.has_state and member.crew.is_training:
                    found.setdefault(stage.number, []).append(peer)
        return found


def standing_of(member: SimulatedMember) -> str:
    """Return a text about the state of a member."""
    crew, best = member.crew, member.ending.best
    state = "has a state" if member.finish.has_state else "has no state"
    head = "" if crew.head is None else " for a head"
    missing = f", lacks {crew.holders_of.missing}" if crew.holders_of is not None else ""
    further = f", also {sorted(crew.taken)}" if crew.taken else ""
    end = f", prefers {best.outcome}, holds {member.ending.holds}" if best is not None else ""
    kind = f"stage {member.stage}" if crew.is_training else "follows"
    return f"{kind} at step {member.own.step}, {state}{head}{missing}{further}{end}"
