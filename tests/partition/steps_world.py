"""A world in memory for the step machines: a trainer, replicas, links, deaths; no clock, no torch.

Every delivery, computation and disturbance is one action, and a seed picks which comes next, so a
seed is a history. Links are as `node.runs.links`: in order, but what a broken link loses comes again
behind what was queued. A fake stage sums integers instead of gradients, so that sums are compared
exactly, and refuses whatever the real one (`partition.execute`) refuses. The world checks while it
runs; `Broken` says what is wrong.
"""

from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import Any

from crypto.errors import RemoteProtocolError
from crypto.facts import Fact
from crypto.identity import PeerId
from partition.plan.plan import Plan, StagePlan, plan_hash
from partition.steps.frames import Direction, Frame, FrameHeader, OpenedFrame, make_frame, open_frame
from partition.steps.replica import (
    ApplyReady,
    BackwardReady,
    ForwardReady,
    ReduceReady,
    ReduceVoided,
    Replica,
    ReplicaDropped,
    StepDiscarded,
)
from partition.steps.trainer import (
    FeedReady,
    ReplicaLost,
    StepApplied,
    Trainer,
    TrainingEvaluated,
    TrainingFailed,
)
from tests.partition.fake_stage import (
    METRICS,
    Broken,
    FakeStage,
    Truth,
    digest,
    input_of,
    label_of,
    loss_of,
    metrics_of,
    payload,
    peer,
    samples_of,
)

ACTIONS_MAX = 50_000
"""A walk has a few hundred; more means that messages go round in circles."""
ALL_STAGES = -1
"""In the place of a stage's number: the reduction of what is tied between all of them."""
SLOW = 0.1
"""The share of links that are 20 times slower, so that what others say overtakes them."""


class HashSigner:
    """Signs with a hash that anybody could make: enough where nobody lies."""

    def __init__(self, peer: PeerId) -> None:
        self.peer = peer

    def sign(self, purpose: str, body: bytes) -> Fact:
        return Fact(self.peer, body, digest(purpose, self.peer, body))

    def check(self, purpose: str, fact: Fact) -> PeerId:
        if fact.signature != digest(purpose, fact.author, fact.body):
            raise RemoteProtocolError("a wrong signature")
        return PeerId(fact.author)


class Node:
    """A replica, its fake stage and its queue of work; dead or alive."""

    def __init__(self, me: PeerId, replica: Replica, stages: int) -> None:
        self.me = me
        self.replica = replica
        self.signer = HashSigner(me)
        self.stage = FakeStage(replica.stage, stages)
        self.work: deque[Any] = deque()
        self.reducing: ReduceReady | None = None
        self.ended = False  # it heard that it is out


class Link:
    """Messages on their way, oldest first; while `broken` they wait."""

    def __init__(self, is_slow: bool) -> None:
        self.is_slow = is_slow
        self.queue: deque[Any] = deque()
        self.broken = False


@dataclass
class _Reduction:
    """One all-reduce, of a stage or of what is tied: what each member brought, and who took the total."""

    members: tuple[PeerId, ...]
    brought: dict[PeerId, dict[int, int]] = field(default_factory=dict)
    taken: list[PeerId] = field(default_factory=list)


class World:
    """One run, its plans one after another, and everything that goes wrong in it."""

    def __init__(
        self,
        rng: Random,
        shape: list[int],
        *,
        microbatches: int,
        steps: int,
        evaluations: int,
        replica_class: type[Replica] = Replica,
        trainer_class: type[Trainer] = Trainer,
    ) -> None:
        self.rng = rng
        self.steps, self.evaluations = steps, evaluations
        self.truth = Truth(len(shape), microbatches, steps, evaluations)
        self.trainer_class = trainer_class
        rows = []
        for stage, replicas in enumerate(shape):
            peers = tuple(peer(f"s{stage}r{replica}") for replica in range(replicas))
            rows.append(StagePlan(stage, stage + 1, peers, tuple(rng.choice((1, 2, 5)) for _ in peers)))
        self.plan = Plan(
            run=bytes(32),
            parent=bytes(32),
            height=0,
            planner=peer("planner"),
            trainer=peer("t0"),
            requester=peer("requester"),
            microbatches=microbatches,
            stages=tuple(rows),
        )
        self.replica_class = replica_class
        self.links: dict[tuple[PeerId, PeerId], Link] = {}
        self.reductions: dict[tuple[bytes, int, int, int], _Reduction] = {}
        self.nodes: dict[PeerId, Node] = {}
        for row in rows:
            for name in row.replicas:
                me = PeerId(name)
                self.nodes[me] = Node(me, replica_class(me, self.plan), len(shape))
        self.unheard: list[PeerId] = []  # dead, and the trainer does not know
        self.wronged: set[PeerId] = set()  # whom the trainer may rightly drop: dead, suspected or failed
        self.applied: dict[tuple[int, int], int] = {}
        self.committed: list[tuple[int, int]] = []  # height, step
        self.replacements = 0
        self.reopened = False  # a stage began anew, so if nobody else is left the run does too
        self.outcome: str | None = None
        self.reason = ""
        self._begin()

    # Plans

    def _begin(self) -> None:
        self.trainer = self.trainer_class(
            PeerId(self.plan.trainer),
            self.plan,
            steps=self.steps,
            evaluations=self.evaluations,
            metrics=METRICS,
        )
        self.signer = HashSigner(self.trainer.me)
        self._from_trainer(self.trainer.start(0.0))

    def replace_trainer(self, *, readmit: bool) -> None:
        """The trainer dies; all that live, or are thought to, get a plan with another."""
        self.replacements += 1
        gone = set() if readmit else set(self.trainer.dropped)
        rows = []
        for stage in self.plan.stages:
            known = [
                (name, rate)
                for name, rate in zip(stage.replicas, stage.rates, strict=True)
                if (name in self.nodes or name in self.unheard) and name not in gone
            ]
            if not known:
                self.outcome, self.reason = "failed", "no plan"
                return
            rows.append(StagePlan(stage.first_layer, stage.last_layer, *zip(*known, strict=True)))
        old = PeerId(self.plan.trainer)
        self._cut(old)
        self.plan = Plan(
            run=self.plan.run,
            parent=plan_hash(self.plan),
            height=self.plan.height + 1,
            planner=self.plan.planner,
            trainer=peer(f"t{self.plan.height + 1}"),
            requester=self.plan.requester,
            microbatches=self.plan.microbatches,
            stages=tuple(rows),
        )
        for me in list(self.nodes):
            if self.plan.stage_of(me) is None:
                self.kill(me)
        self.unheard = [me for me in self.unheard if self.plan.stage_of(me) is not None]
        self.wronged &= set(self.unheard) | (set(self.nodes) if readmit else set())
        # The shells adopt first, in any order, and only then may the trainer begin.
        for me, node in self.nodes.items():
            if node.ended:  # its shell has closed the stage; a new one opens with the first parameters
                self.nodes[me] = Node(me, self.replica_class(me, self.plan), len(self.plan.stages))
                self._forget_reductions(me)
                self.reopened = True
            else:
                node.replica.adopt(self.plan)
                self._drain(node)
        self._begin()

    # Sending

    def _put(self, sender: PeerId, receiver: PeerId, message: Any) -> None:
        if (sender, receiver) not in self.links:
            self.links[sender, receiver] = Link(self.rng.random() < SLOW)
        self.links[sender, receiver].queue.append(message)

    def _from_trainer(self, sends: list[tuple[PeerId, object]]) -> None:
        events = self.trainer.events[:]
        self.trainer.events.clear()
        me = self.trainer.me
        feeds_first = self.rng.random() < 0.5
        if not feeds_first:
            for receiver, message in sends:
                self._put(me, receiver, message)
        for event in events:
            self._trainer_event(event)
        if feeds_first:
            for receiver, message in sends:
                self._put(me, receiver, message)
        for lost in self.trainer.dropped:
            if lost not in self.wronged:
                raise Broken(f"{lost!r} was dropped, and it was neither dead nor suspected")

    def _trainer_event(self, event: Any) -> None:
        match event:
            case FeedReady():
                self._feed(event)
            case StepApplied():
                self.committed.append((self.plan.height, event.step))
                if event.loss != self.truth.losses[event.step]:
                    raise Broken(f"step {event.step} has loss {event.loss}, not {self.truth.losses}")
            case TrainingEvaluated():
                self.outcome = "done"
                if (event.samples, event.metrics) != (self.truth.evaluated, self.truth.metrics):
                    raise Broken(f"evaluated {event}, not {self.truth.evaluated}, {self.truth.metrics}")
            case TrainingFailed():
                self.outcome, self.reason = "failed", event.reason
            case ReplicaLost():
                pass

    def _feed(self, feed: FeedReady) -> None:
        last = len(self.plan.stages) - 1
        halves: list[tuple[PeerId | None, Direction, int, Any]] = [
            (feed.input_to, "input", 0, input_of),
            (feed.labels_to, "labels", last, label_of),
        ]
        for receiver, direction, stage, make in halves:
            if receiver is not None:
                frame = make_frame(
                    self.signer,
                    payload(make(feed.step, feed.microbatch, feed.train)),
                    plan=self.trainer.plan_hash,
                    step=feed.step,
                    microbatch=feed.microbatch,
                    stage=stage,
                    direction=direction,
                    train=feed.train,
                )
                self._put(self.trainer.me, receiver, frame)

    def _from_node(self, node: Node, sends: list[tuple[PeerId, object]]) -> None:
        self._drain(node)
        for receiver, message in sends:
            self._put(node.me, receiver, message)

    def _forget_reductions(self, me: PeerId) -> None:
        for reduction in self.reductions.values():
            reduction.brought.pop(me, None)

    def _drain(self, node: Node) -> None:
        for event in node.replica.events:
            match event:
                case ReduceVoided():
                    for key, reduction in self.reductions.items():
                        if key[:2] == (event.plan, event.step):
                            reduction.brought.pop(node.me, None)
                case ReplicaDropped():
                    node.ended = True
                    if node.me not in self.wronged:
                        raise Broken("a replica was told that it is out, and it is not")
                case _:
                    node.work.append(event)
        node.replica.events.clear()
        if node.ended:
            node.work.clear()

    # What can happen next

    def actions(self) -> list[tuple[Any, ...]]:
        """Every delivery, computation, reconnection and discovery of a death that may come next."""
        found: list[tuple[Any, ...]] = []
        for (sender, receiver), link in self.links.items():
            here = receiver in self.nodes or receiver == self.trainer.me
            if link.broken and (sender in self.nodes or sender == self.trainer.me):
                found.append((self._reconnect, sender, receiver))
            elif link.queue and here and not link.broken:
                found.append((self._deliver, sender, receiver))
        found += [(self._compute, me) for me, node in self.nodes.items() if node.work]
        for key, reduction in self.reductions.items():
            if len(reduction.brought) == len(reduction.members):
                found += [
                    (self._total, key, me)
                    for me in reduction.members
                    if me in self.nodes and me not in reduction.taken
                ]
        found += [(self._notice, me) for me in self.unheard]
        return found

    def run(self, disturbances: int, *, false_suspicion: bool = False, chance: float = 0.03) -> None:
        """Walk until the run has ended; disturb it that often."""
        for _ in range(ACTIONS_MAX):
            if self.outcome is not None:
                self._check_outcome()
                return
            if disturbances and self.rng.random() < chance:
                disturbances -= 1
                self._disturb(false_suspicion)
                continue
            actions = self.actions()
            if not actions:
                raise Broken(f"nothing more happens in phase {self.trainer.phase}, step {self.trainer.step}")
            action, *arguments = self.rng.choice(actions)
            if action == self._deliver and self.links[*arguments].is_slow and self.rng.random() < 0.95:
                continue
            action(*arguments)
        raise Broken("the walk does not end")

    def _check_outcome(self) -> None:
        steps = [step for _, step in self.committed]
        if steps != sorted(set(steps)) and not self.reopened:
            raise Broken(f"steps {steps} were committed")
        if self.outcome == "failed":
            if not self.reason:
                raise Broken("the run failed without a reason")
            if all(set(stage.replicas) - self.wronged for stage in self.plan.stages):
                raise Broken(f"the run failed though every stage had a replica: {self.reason}")
            return
        # A step that a trainer left half applied is finished by the next, which does not know its loss.
        if len(steps) < self.steps - self.replacements:
            raise Broken(f"of {self.steps} steps only {steps} were reported")
        for me in self.trainer.live:
            if (node := self.nodes.get(me)) is not None:
                stage = node.stage
                if (stage.step, stage.parameters) != (self.steps, self.truth.parameters[stage.index]):
                    raise Broken(f"{me!r} ends with other parameters than the undisturbed run")

    def _deliver(self, sender: PeerId, receiver: PeerId) -> None:
        message = self.links[sender, receiver].queue.popleft()
        if receiver == self.trainer.me:
            self._from_trainer(self.trainer.receive(0.0, sender, message))
            return
        node = self.nodes[receiver]
        if node.ended:
            return
        if isinstance(message, Frame):
            message = open_frame(node.signer, sender, message)
        try:
            sends = node.replica.receive(0.0, sender, message)
        except RemoteProtocolError as error:
            # Who was dropped and lives may be behind the others; nobody listens to it any more.
            if receiver in self.trainer.dropped:
                return
            raise Broken(f"{receiver!r} refuses {message} of the honest {sender!r}: {error}") from error
        self._from_node(node, sends)

    def _compute(self, me: PeerId) -> None:
        node = self.nodes[me]
        work = node.work.popleft()
        match work:
            case ForwardReady():
                self._from_node(node, self._forward(node, work))
            case BackwardReady():
                back = node.stage.backward(work.step, work.microbatch, work.gradient.data)
                frame = None if back is None else self._frame(node, work, back, -1, "gradient", True)
                self._from_node(node, node.replica.backwarded(work, gradient=frame))
            case ReduceReady():
                node.stage.total = node.stage.tied_total = None
                everybody = tuple(peer for row in work.members for peer in row)
                self._bring(node, work, node.stage.index, work.members[node.stage.index], node.stage.sums)
                self._bring(node, work, ALL_STAGES, everybody, node.stage.tied_sums)
            case ApplyReady():
                self._apply(node, work)
            case StepDiscarded():
                node.stage.discard()

    def _bring(
        self, node: Node, work: ReduceReady, stage: int, members: tuple[PeerId, ...], sums: dict[int, int]
    ) -> None:
        key = (work.plan, work.step, work.attempt, stage)
        reduction = self.reductions.setdefault(key, _Reduction(members))
        if reduction.members != members:
            raise Broken("two views of who takes part in a reduction")
        if node.me in reduction.brought or node.me in reduction.taken:
            raise Broken("a member takes part twice in one reduction")
        reduction.brought[node.me] = dict(sums)
        node.reducing = work

    def _forward(self, node: Node, work: ForwardReady) -> list[tuple[PeerId, object]]:
        labels = None if work.labels is None else work.labels.data
        output, gradient, numbers = node.stage.forward(
            work.step, work.microbatch, work.train, work.input.data, labels
        )
        last = node.stage.is_last
        return node.replica.forwarded(
            work,
            output=None if output is None else self._frame(node, work, output, +1, "input", work.train),
            gradient=None if gradient is None else self._frame(node, work, gradient, -1, "gradient", True),
            samples=samples_of(work.microbatch),
            loss=loss_of(numbers) if last else 0.0,
            metrics=metrics_of(numbers, work.microbatch) if last else (),
        )

    def _frame(
        self,
        node: Node,
        work: ForwardReady | BackwardReady,
        data: bytes,
        towards: int,
        direction: Direction,
        train: bool,
    ) -> Frame:
        return make_frame(
            node.signer,
            payload(data),
            plan=work.plan,
            step=work.step,
            microbatch=work.microbatch,
            stage=node.stage.index + towards,
            direction=direction,
            train=train,
        )

    def _total(self, key: tuple[bytes, int, int, int], me: PeerId) -> None:
        """The all-reduce ends for one of its members."""
        reduction, node = self.reductions[key], self.nodes[me]
        reduction.taken.append(me)
        total: dict[int, int] = {}
        for member in reduction.members:
            for microbatch, value in reduction.brought[member].items():
                if microbatch in total:
                    raise Broken(f"micro-batch {microbatch} is in two sums")
                total[microbatch] = value
        work = node.reducing
        if work is None or key[:3] != (work.plan, work.step, work.attempt):
            return  # one that was void before this member had begun it
        if key[3] == ALL_STAGES:
            node.stage.tied_total = total
        else:
            node.stage.total = total
        if node.stage.total is None or node.stage.tied_total is None:
            return
        name = digest(sorted(node.stage.total.items()), sorted(node.stage.tied_total.items()))
        self._from_node(node, node.replica.reduced(work, name, node.stage.squared_norm))

    def _apply(self, node: Node, work: ApplyReady) -> None:
        expected = self.truth.totals[work.step][node.stage.index]
        if node.stage.total != expected:
            raise Broken(f"{node.me!r} applies {node.stage.total} in step {work.step}, not {expected}")
        if node.stage.tied_total != self.truth.tied_totals[work.step]:
            raise Broken(f"{node.me!r} applies another total of what is tied in step {work.step}")
        if work.squared_norm != self.truth.squared_norms[work.step]:
            raise Broken(f"{node.me!r} clips by {work.squared_norm} in step {work.step}")
        parameters = node.stage.apply(work.step, work.samples, work.squared_norm)
        self._from_node(node, node.replica.applied(work, parameters))
        if node.replica._kept or node.replica._microbatches:
            raise Broken("frames are kept after their step was applied")

    # Disturbances

    def _disturb(self, false_suspicion: bool) -> None:
        everybody = list(self.nodes)
        choice = self.rng.choice(["kill", "break", "break", "trainer", "fail", "suspect"])
        match choice:
            case "break":
                self._break()
            case "trainer":
                self.replace_trainer(readmit=false_suspicion and self.rng.random() < 0.5)
            case "kill" if everybody:
                self.kill(self.rng.choice(everybody))
            case "fail" if everybody:
                node = self.nodes[self.rng.choice(everybody)]
                self.wronged.add(node.me)
                self._from_node(node, node.replica.failed("the stage process is gone"))
            case "suspect" if everybody and false_suspicion:
                self._notice(self.rng.choice(everybody))

    def kill(self, me: PeerId) -> None:
        """SIGKILL: of what it sent, only what has left already may arrive."""
        del self.nodes[me]
        self._cut(me)
        self.unheard.append(me)
        self.wronged.add(me)

    def _cut(self, me: PeerId) -> None:
        for (sender, receiver), link in self.links.items():
            if sender == me:
                for _ in range(self.rng.randint(0, len(link.queue))):
                    link.queue.pop()
                link.broken = False
            elif receiver == me:
                link.queue.clear()
                link.broken = False

    def _notice(self, me: PeerId) -> None:
        if me in self.unheard:
            self.unheard.remove(me)
        self.wronged.add(me)
        self._from_trainer(self.trainer.drop(0.0, me))

    def _break(self) -> None:
        """A stream breaks: what was in flight is lost, what was still queued is not."""
        links = [
            link
            for (sender, receiver), link in self.links.items()
            if link.queue and receiver not in self.unheard and not link.broken
        ]
        if not links:
            return
        link = self.rng.choice(links)
        link.broken = True
        messages = list(link.queue)
        lost = self.rng.randint(0, len(messages))
        again = [messages[lost - 1]] if lost and self.rng.random() < 0.3 else []
        link.queue = deque(again + messages[lost:])

    def _reconnect(self, sender: PeerId, receiver: PeerId) -> None:
        self.links[sender, receiver].broken = False
        if sender == self.trainer.me:
            self._from_trainer(self.trainer.reconnected(receiver))
        else:
            node = self.nodes[sender]
            self._from_node(node, node.replica.reconnected(receiver))


def opened(author: PeerId, header: FrameHeader, data: bytes = b"x") -> OpenedFrame:
    """A frame as `open_frame` hands it over."""
    return OpenedFrame(author, header, payload(data))
