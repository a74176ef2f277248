"""A world in memory for the step machines: peers, links, a chain of plans, and all faults.

Every delivery, computation and disturbance is one event, and a seed picks the next event, so a seed
determines a history. Links are like those of `node.pipeline.links`: ordered, but messages lost by a broken
link come again behind the queued ones. Plans follow from each other by `partition.plan.change.successor` and
are decided here immediately; every peer learns of them at its own time. A fake stage sums integers instead of
gradients, so that sums are compared exactly. The world checks while it runs; `Broken` names the violation.
The faults are in `steps_trouble`.
"""

from collections.abc import Iterator
from random import Random
from typing import Any

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.change import Change, Joining, successor
from partition.plan.plan import NO_HASH, Plan, StagePlan
from partition.steps.committer import (
    ReplicaFailed,
    Resumed,
    StepApplied,
    StepsPaused,
    TrainingEvaluated,
    TrainingFailed,
)
from partition.steps.committer_events import Validated
from partition.steps.frames import OpenedFrame
from partition.steps.messages import CommitterMessage, Open, ReplicaMessage, StepMessage
from partition.steps.replica import ApplyReady, FillReady, ReduceReady, SaveReady
from tests.partition.fake_stage import Broken, Truth, digest, peer
from tests.partition.steps_judged import check_given_up, waits
from tests.partition.steps_links import Learning, Link, Pool, Taking
from tests.partition.steps_machine import ALL_STAGES, Key, Machine, Reduction, Sends, Settings
from tests.partition.steps_trouble import DISTURBANCES, disturb, reconnect

EVENTS_MAX = 60_000
"""Maximum number of events. A history has some thousand; more means that messages go round in circles."""
IDLE_WAKES_MAX = 150
"""Maximum number of timers that may fire, with only messages in between, before a stall is reported."""
SLOW = 0.1
"""Share of links and of learners that are 20 times slower, so that other messages overtake theirs."""
ENCODED = 0.002
"""Share of messages that are encoded and decoded. This only checks that encoding works."""


class World:
    """One run, its plans one after another, and all faults."""

    def __init__(
        self,
        rng: Random,
        shape: list[int],
        *,
        microbatches: int,
        trainers: int = 1,
        spares: int = 0,
        settings: Settings,
    ) -> None:
        self.rng = rng
        self.settings = settings
        self.truth = Truth(
            len(shape),
            microbatches,
            settings.steps,
            settings.evaluations,
            frozen=settings.frozen,
            validations=settings.validations,
            validation=settings.validation,
        )
        stages = []
        for stage, replicas in enumerate(shape):
            peers = tuple(peer(f"s{stage}r{replica}") for replica in range(replicas))
            stages.append(StagePlan(stage, stage + 1, peers, tuple(rng.choice((1, 2, 5)) for _ in peers)))
        feeding = tuple(peer(f"t{number}") for number in range(trainers))
        others = tuple(peer(f"x{number}") for number in range(spares))
        roster = tuple(sorted((*(name for row in stages for name in row.replicas), *feeding, *others)))
        first = Plan(
            run=bytes(32),
            parent=NO_HASH,
            height=0,
            roster=roster,
            trainers=feeding,
            microbatches=microbatches,
            stages=tuple(stages),
        )
        self.plans = [first]
        self.changes = [Change()]
        self.now = 0.0
        self.events = 0
        self.progress = 0
        self.pool = Pool(rng)
        self.links: dict[tuple[PeerId, PeerId], Link] = {}
        self.reductions: dict[Key, Reduction] = {}
        self.copies: dict[int, dict[int, bytes]] = {}  # step, stage
        self.committed: list[tuple[int, int]] = []  # height, step
        self.commits: dict[int, int] = {}  # the attempt of each step
        self.resumed: set[int] = set()
        self.seen: dict[str, int] = {}
        self.outcome: str | None = None
        self.reason = ""
        self.lied = False
        self.liar: PeerId | None = None
        self.slow_learners: set[PeerId] = set()
        self.machines = {
            PeerId(name): Machine(PeerId(name), settings, first, rng.choice((0.3, 1.0, 1.0)))
            for name in roster
        }
        for machine in self.machines.values():
            if rng.random() < SLOW:
                self.slow_learners.add(machine.me)
            if machine.committer is not None:
                self.pass_on(machine, machine.committer.start(self.now))

    @property
    def plan(self) -> Plan:
        """The newest plan."""
        return self.plans[-1]

    def alive(self, peers: tuple[bytes, ...]) -> list[Machine]:
        return [self.machines[PeerId(name)] for name in peers if self.machines[PeerId(name)].is_alive]

    # Plans

    def decide(self, change: Change) -> None:
        """Decide the next plan; every peer learns of it sooner or later."""
        lost = set(change.lost)
        for number, stage in enumerate(self.plan.stages):
            left = set(stage.replicas) - lost - {row.peer for row in change.joined}
            if not left and not any(row.stage == number for row in change.joined):
                self._lose_stage(change, number)
                return
        if not self.alive(tuple(set(self.plan.roster) - lost)):
            self._end("failed", "nobody is left")
            return
        self.plans.append(successor(self.plan, change))
        self.changes.append(change)
        judge = self.machines[self.plan.committer]
        judge.spoils = judge.accuses = 0
        self._mend()
        for machine in self.machines.values():
            if machine.is_alive:
                self.pool.add(Learning(machine))

    def _mend(self) -> None:
        """Correct the replicas that hold wrong parameters and may now be believed, because the last replica
        that could contradict them may be dead.
        """
        for stage in self.plan.stages:
            wrong = [each for each in self.alive(stage.replicas) if each.is_corrupt]
            right = [each for each in self.alive(stage.replicas) if not each.is_corrupt]
            if len(right) < 2 or len(right) <= len(wrong):
                for machine in wrong:
                    machine.mend(self.truth.parameters)

    def _lose_stage(self, change: Change, stage: int) -> None:
        """Resume from a checkpoint with a different member after the parameters of a stage are lost."""
        free = [
            machine
            for machine in self.alive(self.plan.roster)
            if self.plan.stage_of(machine.me) is None and machine.me not in change.lost
        ]
        free = [machine for machine in free if all(row.peer != machine.me for row in change.joined)]
        step = self.checkpoint()
        if not free or step is None:
            self._end("failed", f"no plan without stage {stage}")
            return
        row = Joining(self.rng.choice(free).me, stage, 1)
        self.decide(
            Change(
                lost=change.lost,
                joined=(*change.joined, row),
                trainers=change.trainers,
                restored=digest("checkpoint", step),
                step=step,
            )
        )

    def checkpoint(self) -> int | None:
        """The newest step of which every stage has a copy."""
        whole = [step for step, rows in self.copies.items() if len(rows) == len(self.plan.stages)]
        return max(whole, default=None)

    def restore(self) -> None:
        """Go back to a checkpoint, if there is one."""
        step = self.checkpoint()
        if step is not None:
            self.decide(Change(restored=digest("checkpoint", step), step=step))

    def _learn(self, machine: Machine) -> None:
        if machine.height + 1 >= len(self.plans):
            return
        if machine.me in self.slow_learners and self.rng.random() < 0.95:
            self.pool.add(Learning(machine))
            return
        height = machine.height + 1
        self.pass_on(machine, machine.adopt(self.plans[height], self.changes[height], self.now))
        if machine.height + 1 < len(self.plans):
            self.pool.add(Learning(machine))
        for other in self.machines.values():  # a filling may have waited for it
            if isinstance(other.work, FillReady):
                self.pool.add(other)

    # Sending

    def pass_on(self, machine: Machine, sends: Sends) -> None:
        """Deliver a core's messages, and act on its events."""
        if machine.replica is not None and machine.replica.events:
            for void in machine.take_voids():
                for key, reduction in self.reductions.items():
                    # The machine may have sent all its parts before.
                    if key[:2] == (void.plan, void.step) and self.rng.random() < 0.5:
                        reduction.brought.pop(machine.me, None)
            asked, machine.asked = machine.asked, []
            sends = [*sends, *(send for event in asked for send in waits(self, machine, event))]
        if machine.feeder is not None and machine.feeder.events:
            for receiver, frame in machine.fed():
                self._put(machine, receiver, frame)
        for receiver, message in sends:
            self._put(machine, receiver, message)
        if machine.committer is not None and machine.committer.events:
            events = machine.committer.events[:]
            machine.committer.events.clear()
            check_given_up(self, [event for event in events if isinstance(event, ReplicaFailed)])
            for event in events:
                self._hear(machine, event)
        if machine.work is None and machine.begin(self.now):
            self._begin(machine)

    def _put(self, sender: Machine, receiver: PeerId, message: Any) -> None:
        if isinstance(message, StepMessage) and self.rng.random() < ENCODED:
            self._encode(message)
        link = self.links.get((sender.me, receiver))
        if link is None:
            is_slow = sender.me != receiver and self.rng.random() < SLOW
            link = Link(sender, self.machines[receiver], is_slow)
            self.links[sender.me, receiver] = link
        if link.is_slow:  # it is signed when it is really sent
            link.queue.append(message)
        elif (signed := sender.wired(message)) is not None:
            link.queue.append(signed)
        if link.queue:
            self.pool.add(link)

    def _encode(self, message: StepMessage) -> None:
        kinds: Any = CommitterMessage | ReplicaMessage
        if decode(encode(message), kinds, bytes_max=2**20) != message:
            raise Broken(f"{message} is another message once it is encoded")

    def _begin(self, machine: Machine) -> None:
        """Note that a machine's stage has work from now on."""
        work = machine.work
        if isinstance(work, ReduceReady) and machine.hangs:
            return
        if isinstance(work, ReduceReady):
            stage = machine.stage
            stage.total = stage.tied_total = None
            machine.has_reported = False
            everybody = tuple(name for row in work.members for name in row)
            self._bring(machine, stage.index, work.members[stage.index], stage.sums)
            self._bring(machine, ALL_STAGES, everybody, stage.tied_sums)
        else:
            self.pool.add(machine)

    def _bring(self, machine: Machine, stage: int, members: tuple[PeerId, ...], sums: dict[int, int]) -> None:
        work = machine.work
        key = (work.plan, work.step, work.attempt, stage)
        reduction = self.reductions.setdefault(key, Reduction(members))
        if reduction.members != members:
            raise Broken("two views of who takes part in a reduction")
        if machine.me in reduction.brought or machine.me in reduction.taken:
            raise Broken("a member takes part twice in one reduction")
        reduction.brought[machine.me] = dict(sums)
        if len(reduction.brought) == len(members):
            for name in members:
                self.pool.add(Taking(key, self.machines[name]))

    def notice(self, peers: tuple[bytes, ...]) -> None:
        """Declare these members dead, so that the next plan excludes them."""
        lost = tuple(name for name in peers if name in self.plan.roster)
        if lost and self.outcome is None:
            self.decide(Change(lost=lost))

    def rejoin(self, machine: Machine) -> None:
        """Restart a machine that has lost the memory of its stage."""
        stage = self.plan.stage_of(machine.me)
        if stage is not None and len(self.plan.stages[stage].replicas) > 1:
            self.decide(Change(lost=(machine.me,), joined=(Joining(machine.me, stage, 1),)))

    def _replace(self, name: PeerId) -> None:
        if self.machines[name].is_alive and self.rng.random() < 0.5:
            self.rejoin(self.machines[name])
        if self.plan.stage_of(name) is not None or name in self.plan.trainers:
            self.notice((name,))

    # Events

    def run(self, disturbances: int, *, chance: float = 0.02, kinds: tuple[str, ...] = DISTURBANCES) -> None:
        """Walk until the run has ended, with this many disturbances."""
        idle = 0
        while self.outcome is None:
            if self.events > EVENTS_MAX:
                raise Broken("the walk does not end")
            if disturbances and self.rng.random() < chance:
                disturbances -= 1
                self.events += 1
                disturb(self, self.rng.choice(kinds))
            elif self.pool:
                before = self.progress
                self.step()
                idle = 0 if self.progress > before else idle
            else:
                idle += 1
                self._pass_time(idle)
        self._check_outcome()

    def step(self) -> None:
        """Run one possible event."""
        token = self.pool.take()
        actor = token.receiver if isinstance(token, Link) else token
        actor = actor if isinstance(actor, Machine) else actor.machine
        if not actor.is_alive:
            return
        if actor.is_frozen:
            actor.parked.append(token)
            return
        self.now += 0.004 * self.rng.random()
        match token:
            case Link() if token.is_broken:
                token.is_broken = False
                self.pool.add(token)
                if token.sender.is_alive:
                    reconnect(self, token.sender, token.receiver.me)
            case Link() if not token.queue:
                return
            case Link():
                if token.is_slow and self.rng.random() < 0.95:
                    self.pool.add(token)
                    return
                self._deliver(token)
            case Machine():
                if self.rng.random() > token.speed:
                    self.pool.add(token)
                    return
                self.progress += 1
                self._compute(token)
            case Learning():
                self.progress += 1
                self._learn(actor)
            case Taking():
                self.progress += 1
                self._take(token)
        self.events += 1
        self._wake()

    def thaw(self, machine: Machine) -> None:
        """Resume it where it was stopped."""
        machine.is_frozen = False
        for token in machine.parked:
            self.pool.add(token)
        machine.parked.clear()

    def _wake(self) -> None:
        for machine in self.machines.values():
            committer = machine.committer
            runs = machine.is_alive and not machine.is_frozen
            if committer is not None and runs and committer.deadline <= self.now:
                self.pass_on(machine, committer.wake(self.now))
            if machine.is_frozen and machine.frozen_until <= self.now:
                self.thaw(machine)

    def _pass_time(self, idle: int) -> None:
        """Let a timer fire, or resume a machine."""
        if idle > IDLE_WAKES_MAX:
            phases = [
                (machine.height, machine.committer.phase, machine.committer.step)
                for machine in self.machines.values()
                if machine.committer is not None and machine.is_alive
            ]
            raise Broken(f"nothing more happens: {phases}")
        times = [machine.frozen_until for machine in self.machines.values() if machine.is_frozen]
        times += [
            machine.committer.deadline
            for machine in self.machines.values()
            if machine.committer is not None and machine.is_alive and not machine.is_frozen
        ]
        soonest = min(times, default=self.now)
        self.now = max(self.now, soonest) if soonest < 1e18 else self.now
        self._wake()
        gone = [name for name in self.plan.roster if not self.machines[PeerId(name)].is_alive]
        # This is how long a shell waits for the members that must report their positions.
        judge = self.machines[self.plan.committer].committer
        if idle > IDLE_WAKES_MAX // 2 and judge is not None and judge.phase == "syncing":
            gone += [name for name in judge.awaited if self.machines[name].hangs and name not in gone]
        if gone and self.rng.random() < 0.2:
            self.notice(tuple(gone))

    def _deliver(self, link: Link) -> None:
        message = link.queue.popleft()
        if link.queue:
            self.pool.add(link)
        sender, receiver = link.sender, link.receiver
        if link.is_slow and sender.is_alive:
            message = sender.wired(message)
        if message is None:
            return
        try:
            for sends in self._receive(sender.me, receiver, message):
                self.pass_on(receiver, sends)
        except RemoteProtocolError as error:
            raise Broken(f"{receiver.me!r} refuses {message} of the honest {sender.me!r}: {error}") from error

    def _receive(self, sender: PeerId, machine: Machine, message: Any) -> Iterator[Sends]:
        """Deliver a message to the role that it is for."""
        if isinstance(message, (OpenedFrame, CommitterMessage)):
            if machine.feeder is not None and isinstance(message, Open):
                yield machine.feeder.receive(self.now, sender, message)
            if machine.replica is not None:
                yield machine.replica.receive(self.now, sender, message)
        elif machine.committer is not None and isinstance(message, StepMessage):
            yield machine.committer.receive(self.now, sender, message)

    def _compute(self, machine: Machine) -> None:
        work = machine.work
        hangs = machine.hangs and isinstance(work, ApplyReady)
        if work is None or isinstance(work, ReduceReady) or hangs:
            return
        self._see(work)
        if isinstance(work, FillReady):
            self._fill(machine, work)
            return
        if isinstance(work, ApplyReady):
            self._check_apply(machine, work)
        if isinstance(work, SaveReady):
            self._keep_copy(machine, work)
            return
        self.pass_on(machine, machine.compute())
        if isinstance(work, ApplyReady):
            self._mend()
            if not machine.is_bounded:
                raise Broken("something of a step is kept after it was applied")

    def _fill(self, machine: Machine, work: FillReady) -> None:
        if work.checkpoint != NO_HASH:
            if work.checkpoint != digest("checkpoint", work.step):
                raise Broken("a checkpoint of another step than the plan says")
            self.pass_on(machine, machine.filled(self.copies[work.step][machine.stage.index]))
            return
        able = [
            source
            for source in (self.machines[name] for name in work.sources)
            if source.is_alive and source.replica is not None and source.replica.step == work.step
        ]
        # Without any source the stage waits: the next plan will name others.
        if able:
            source = self.rng.choice(able)
            if source.is_corrupt or source.stage.step != work.step:
                raise Broken("a stage is filled from one that does not hold what it should")
            self.pass_on(machine, machine.filled(source.stage.parameters))

    def _keep_copy(self, machine: Machine, work: SaveReady) -> None:
        stage = machine.stage
        if stage.parameters != self.truth.parameters[work.step][stage.index]:
            raise Broken("a copy of what nobody should hold")
        self.copies.setdefault(work.step, {})[stage.index] = stage.parameters
        machine.work = None
        assert machine.replica is not None
        self.pass_on(machine, machine.replica.saved(work))

    def _take(self, token: Taking) -> None:
        """End the all-reduce for one of its members."""
        reduction = self.reductions[token.key]
        if len(reduction.brought) < len(reduction.members):
            return  # it was void before it ended
        reduction.taken.add(token.machine.me)
        total: dict[int, int] = {}
        for member in reduction.members:
            for microbatch, value in reduction.brought[member].items():
                if microbatch in total:
                    raise Broken(f"micro-batch {microbatch} is in two sums")
                total[microbatch] = value
        self.pass_on(token.machine, token.machine.reduced(token.key, total))

    def _check_apply(self, machine: Machine, work: ApplyReady) -> None:
        stage = machine.stage
        if stage.total != self.truth.totals[work.step][stage.index]:
            raise Broken(f"{machine.me!r} applies {stage.total} in step {work.step}")
        if stage.tied_total != self.truth.tied_totals[work.step]:
            raise Broken(f"{machine.me!r} applies another total of what is tied in step {work.step}")
        if work.squared_norm != self.truth.squared_norms[work.step]:
            raise Broken(f"{machine.me!r} clips by {work.squared_norm} in step {work.step}")
        if stage.parameters != self.truth.parameters[work.step][stage.index]:
            raise Broken(f"{machine.me!r} applies step {work.step} to other parameters than its stage")

    # Events of the committer

    def _hear(self, machine: Machine, event: Any) -> None:
        self._see(event)
        match event:
            case StepApplied():
                self._check_step(machine, event)
            case Validated():
                self._check_validated(event)
            case TrainingEvaluated():
                self._check_ended(machine, event)
                self._end("done", "")
            case TrainingFailed():
                self._check_failed(machine, event)
            case Resumed():
                if machine.height in self.resumed:
                    raise Broken("a plan resumes twice")
                self.resumed.add(machine.height)
        if machine.height + 1 == len(self.plans):
            self._act_on(event)

    def _act_on(self, event: Any) -> None:
        """Act on the committee's decisions as shells do."""
        match event:
            case TrainingFailed() if self.checkpoint() is None:
                self._end("failed", event.reason)
            case TrainingFailed():
                self.restore()
            case ReplicaFailed():
                self._replace(event.peer)
            case StepsPaused():
                self.decide(Change(trainers=(*self.plan.trainers[1:], self.plan.trainers[0])))

    def _see(self, what: object) -> None:
        name = type(what).__name__
        self.seen[name] = self.seen.get(name, 0) + 1

    def _check_step(self, machine: Machine, event: StepApplied) -> None:
        if event.loss != self.truth.losses[event.step]:
            raise Broken(f"step {event.step} has loss {event.loss}, not {self.truth.losses}")
        if [len(row) for row in event.work] != [
            len(row.replicas) for row in self.plans[machine.height].stages
        ]:
            raise Broken("the work of a step is not that of its replicas")
        if event.step not in self.chain():
            self.committed.append((machine.height, event.step))
            self.commits[event.step] = event.attempt
        elif self.commits[event.step] != event.attempt:
            raise Broken(f"step {event.step} is committed twice")

    def _check_validated(self, event: Validated) -> None:
        found = event.sums.samples, event.sums.metrics, event.series
        if found != self.truth.validated.get(event.step):
            raise Broken(f"validated {found} after {event.step} steps, not {self.truth.validated}")
        for other in self.machines.values():
            other.told.append(event.series)

    def chain(self) -> list[int]:
        """Return the reported steps of the surviving chain: those that no checkpoint took back."""
        return [
            step
            for height, step in self.committed
            if not any(
                plan.restored != NO_HASH and plan.height > height and plan.step <= step for plan in self.plans
            )
        ]

    def _check_failed(self, machine: Machine, event: TrainingFailed) -> None:
        """Return whether really no step can be resumed."""
        plan = self.plans[machine.height]
        rows = [[self.machines[PeerId(name)] for name in stage.replicas] for stage in plan.stages]
        held = [
            {step for each in row if each.height == machine.height for step in each.reachable} for row in rows
        ]
        if set.intersection(*held):
            raise Broken(f"the run failed though every stage can go on: {event.reason}")

    def _end(self, outcome: str, reason: str) -> None:
        self.outcome, self.reason = outcome, reason

    def _check_ended(self, machine: Machine, event: TrainingEvaluated) -> None:
        if (event.samples, event.metrics) != (self.truth.evaluated, self.truth.metrics):
            raise Broken(f"evaluated {event}, not {self.truth.evaluated}, {self.truth.metrics}")
        plan = self.plans[machine.height]
        for number, stage in enumerate(plan.stages):
            for name in stage.replicas:
                other = self.machines[PeerId(name)]
                if other.is_alive and other.height == machine.height:
                    held = other.stage.step, other.stage.parameters
                    if held != (self.truth.steps, self.truth.parameters[-1][number]):
                        raise Broken(f"{other.me!r} ends with other parameters than the undisturbed run")

    def _check_outcome(self) -> None:
        if self.outcome == "failed" and not self.reason:
            raise Broken("the run failed without a reason")
        if self.outcome == "done" and sorted(self.chain()) != list(range(self.truth.steps)):
            raise Broken(f"of {self.truth.steps} steps only {self.chain()} were reported")
        every = self.settings.save_every
        for step in range(every, self.truth.steps, every) if every and self.outcome == "done" else ():
            if len(self.copies.get(step, ())) < len(self.plan.stages):
                raise Broken(f"no copy of step {step} was made, and one was due")
        for machine in self.machines.values():
            core = machine.replica
            if core is not None and len(core._order.microbatches) > self.plan.microbatches:
                raise Broken("more than a step is kept")
