"""This node's membership in one run: the plan in force, and the roles it gives to this node.

A member may be a stage's replica, the trainer, both, or only follow (requester, planner). When the
trainer dies, the live member with the lowest id plans on (the placeholder of `placement`), and the
new trainer begins from the step that the replicas have reached.
"""

from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, Protocol

import msgspec
import trio

from crypto.errors import RemoteProtocolError
from crypto.facts import Signer
from crypto.identity import PeerId
from node.errors import PeerloomError, StageFailed, Unreachable
from node.events import Event
from node.runs.admission import Machine, specify
from node.runs.data import Dataset
from node.runs.manifest import Run
from node.runs.models import Models
from node.runs.placement import START_SECONDS_MAX, NotPlaced, plan_without, start_all
from node.runs.replica import ReplicaShell
from node.runs.requests import (
    REASON_LENGTH_MAX,
    Declined,
    End,
    Notice,
    Renew,
    Reply,
    Request,
    check_notice,
)
from node.runs.submission import fits, make_batches
from node.runs.trainer import RunEvent, TrainerShell
from node.runs.weights import collect, fetch_weights, keep
from node.seams import Seams
from partition.model.graph import Graph
from partition.plan.plan import HASH_BYTES, Plan, follows, plan_hash, planner_of
from partition.steps.messages import ReplicaMessage

END_SECONDS_MAX = 60.0
"""A member fetches the weights before it answers an End."""
RETRY_SECONDS = 1.0
RENEW_SECONDS = 20.0
"""How often a trainer says that the run goes on, and hears who has forgotten it: a step may take minutes."""
RENEW_SECONDS_MAX = 10.0
TRAINER_SILENCE_SECONDS_MAX = START_SECONDS_MAX + 30
"""A trainer that lives but says nothing for so long has forgotten the run: it was restarted."""


class Service(Protocol):
    """What a member needs of `node.runs.runs.Runs`."""

    seams: Seams
    signer: Signer
    models: Models
    machine: Machine
    live: Callable[[], Sequence[PeerId]]
    publish: Callable[[Event], None]
    nursery: trio.Nursery | None

    def send(self, peer: PeerId, message: Any) -> None: ...
    def load_data(self, run: Run) -> Dataset: ...
    def ended(self, member: "RunMember", outcome: str, detail: str, weights: str) -> None: ...
    async def ask(self, peer: PeerId, request: Request, seconds: float) -> Reply: ...


class RunMember:
    """One run on this node, from its manifest to its end."""

    SILENCE_SECONDS_MAX: ClassVar[float] = 2 * START_SECONDS_MAX
    """Nothing heard of a run for so long: its stage is closed and its slot is free again. Time enough for the
    planner to find another trainer first."""

    def __init__(self, service: Service, run: Run) -> None:
        self.run = run
        self.plan: Plan | None = None
        self.begun = False
        self._service = service
        self._me = service.signer.peer
        self._replica: ReplicaShell | None = None
        self._replica_scope = trio.CancelScope()
        self._trainer: TrainerShell | None = None
        self._trainer_scope = trio.CancelScope()
        self._heard = service.seams.clock.monotonic()
        self._is_ended = False
        self._is_opening = False
        self._is_replanning = False
        self._starting = trio.Lock()

    @property
    def hosts(self) -> bool:
        """Whether a stage of this run is open here, or being opened."""
        return self._is_opening or self._replica is not None

    @property
    def plan_hash(self) -> bytes | None:
        """Of the plan in force."""
        return None if self.plan is None else plan_hash(self.plan)

    # Plans

    def may_follow(self, plan: Plan) -> bool:
        """Whether `plan` is the next link of this run's chain, or the one in force."""
        if self.plan is None:
            return (plan.height, plan.parent) == (0, bytes(HASH_BYTES))
        return plan == self.plan or follows(plan, self.plan)

    async def start(self, plan: Plan) -> None:
        """The plan comes into force here: open this node's stage, if it has one. Raises StageFailed."""
        async with self._starting:
            if plan != self.plan:
                await self._start(plan)

    async def _start(self, plan: Plan) -> None:
        self._trainer_scope.cancel()
        self._trainer = None
        first = self.plan is None
        self.plan, self.begun = plan, False
        self._heard = self._service.seams.clock.monotonic()
        if first:
            self._start_task(self._give_up_on_silence)
        stage = plan.stage_of(self._me)
        if stage is None:
            await self.close_stage()
        elif self._replica is not None:
            self._replica.adopt(plan)
        else:
            self._is_opening = True
            try:
                await self._open_stage(plan, stage)
            finally:
                self._is_opening = False

    async def _open_stage(self, plan: Plan, stage: int) -> None:
        service = self._service
        executor = service.seams.executor
        try:
            graph = await self._graph()
            wanted = partial(specify, self.run, graph, plan, stage, service.machine)
            specification, parts, data = await executor.run(wanted)
            opened = await executor.open_stage(data)
        except Unreachable as error:
            raise StageFailed(error.detail) from None
        except RemoteProtocolError as error:
            raise StageFailed(f"no stage can be made of this plan: {error}") from None
        except OSError as error:
            raise StageFailed(f"no process can be started: {error}") from None
        try:
            await service.models.fill(opened, specification, self._holders())
            if self._is_ended:
                raise StageFailed("the run ended before its stage was open")
        except BaseException:
            await opened.aclose()
            raise
        frames = self.run.manifest.frames
        shell = ReplicaShell(
            service.signer, plan, specification, parts, opened, executor, service.send, frames
        )
        self._replica = shell
        self._replica_scope = trio.CancelScope()
        self._start_task(lambda: self._host(shell, self._replica_scope))

    async def _graph(self) -> Graph:
        """The run's model, from here or from another member. Raises Unreachable."""
        return await self._service.models.get(self.run.manifest.graph_hash, self._holders())

    def _holders(self) -> list[PeerId]:
        """Who may hand over what the run is made of: the requester first, then every other member."""
        members = () if self.plan is None else self.plan.members
        others = [peer for peer in members if peer not in (self._me, self.run.requester)]
        return [self.run.requester, *others]

    async def _host(self, shell: ReplicaShell, scope: trio.CancelScope) -> None:
        with scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(shell.run)
                await shell.dropped.wait()
                nursery.cancel_scope.cancel()
        if self._replica is shell:
            await self.close_stage()

    async def close_stage(self) -> None:
        """End this node's stage process, if there is one."""
        shell, self._replica = self._replica, None
        if shell is not None:
            self._replica_scope.cancel()
            with trio.CancelScope(shield=True):
                await shell.aclose()

    async def begin(self) -> str | None:
        """As the trainer of the plan in force: start feeding. Returns why it cannot, if so."""
        plan, service = self.plan, self._service
        if plan is None or plan.trainer != self._me:
            return "this node is not the trainer of the plan"
        if self.begun:
            return None
        self.begun = True  # before anything is awaited: a second Begin must not make a second trainer
        manifest = self.run.manifest
        try:
            graph = await self._graph()
            dataset = await service.seams.executor.run(lambda: service.load_data(self.run))
        except (PeerloomError, NotPlaced, Unreachable) as error:
            self.begun = False
            return str(error)
        if plan != self.plan or self._is_ended:
            return "another plan is in force"
        if not fits(dataset, manifest, graph):
            self.begun = False
            return "the data this node has does not fit the run's manifest; has it changed?"
        batches = make_batches(dataset, manifest, graph)
        shell = TrainerShell(
            service.signer,
            self.run,
            plan,
            batches,
            service.seams.executor,
            service.seams.clock,
            service.send,
            self._publish_and_notify,
        )
        self._trainer = shell
        self._trainer_scope = scope = trio.CancelScope()
        self._start_task(lambda: self._train(shell, plan, scope))
        return None

    async def _train(self, shell: TrainerShell, plan: Plan, scope: trio.CancelScope) -> None:
        with scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._renew, shell, plan)
                self._drop_the_dead(shell, plan)
                reason = await shell.run()
                digest = ""
                if reason is None:
                    try:
                        digest = await self._collect(shell, plan)
                    except Unreachable as error:
                        reason = error.detail
                    except OSError as error:
                        reason = f"the weights could not be kept: {error.strerror or error}"
                await self._finish(plan, "done" if reason is None else "failed", reason or "", digest)
                nursery.cancel_scope.cancel()

    async def _collect(self, shell: TrainerShell, plan: Plan) -> str:
        """Join the stages' parameters and keep them; their hash. Raises Unreachable or OSError."""
        seams = self._service.seams
        live = [peer for peer in self._service.live() if peer not in shell.core.dropped]
        own = None
        if self._replica is not None:
            with suppress(StageFailed):  # another replica of its stage may hand them over
                own = await self._replica.export()
        data = await collect(self.run, await self._graph(), plan, live, self._me, own, seams)
        return await seams.executor.run(lambda: keep(seams.storage, self.run.text, data))

    async def _renew(self, shell: TrainerShell, plan: Plan) -> None:
        """Say that the run goes on; a member that does not know it any more was restarted and is out."""
        message = Renew(plan_hash(plan))

        async def renew(peer: PeerId) -> None:
            with suppress(Unreachable):  # whether it is dead is for SWIM to say
                reply = await self._service.ask(peer, message, RENEW_SECONDS_MAX)
                if isinstance(reply, Declined):
                    shell.drop(peer)

        while True:
            await trio.sleep(RENEW_SECONDS)
            async with trio.open_nursery() as nursery:
                for peer in self._others(plan):
                    nursery.start_soon(renew, peer)

    def _drop_the_dead(self, shell: TrainerShell, plan: Plan) -> None:
        """Who died between the plan and its beginning was announced to nobody's trainer."""
        live = self._service.live()
        for peer in plan.members:
            if peer not in live:
                shell.drop(peer)

    # The end

    async def _finish(self, plan: Plan, outcome: str, detail: str, weights: str) -> None:
        """As trainer or planner: tell every live member, then end here."""
        message = End(plan_hash(plan), outcome, detail[:REASON_LENGTH_MAX], weights)

        async def tell(peer: PeerId) -> None:
            while peer in self._service.live():
                with suppress(Unreachable):
                    await self._service.ask(peer, message, END_SECONDS_MAX)
                    return
                await trio.sleep(RETRY_SECONDS)

        # Who cannot be told in time gives the run up by silence, and finds the weights by the DHT.
        with trio.move_on_after(END_SECONDS_MAX):
            async with trio.open_nursery() as nursery:
                for peer in self._others(plan):
                    nursery.start_soon(tell, peer)
        await self.end(outcome, detail, weights)

    def _others(self, plan: Plan) -> list[PeerId]:
        """The live members of a plan but for this node."""
        live = self._service.live()
        return [peer for peer in plan.members if peer != self._me and peer in live]

    async def end(self, outcome: str, detail: str, weights: str, *, source: PeerId | None = None) -> None:
        """The run is over here: fetch the result from `source`, close the stage, say so."""
        if self._is_ended:
            return
        self._is_ended = True
        seams = self._service.seams
        if outcome == "done" and source is not None:
            try:
                data = await fetch_weights(seams, self.run.text, [source], weights)
                await seams.executor.run(lambda: keep(seams.storage, self.run.text, data))
            except Unreachable as error:
                detail = f"the weights are not here: {error.detail}"
            except OSError as error:
                detail = f"the weights could not be kept: {error.strerror or error}"
        await self.close_stage()
        self._service.ended(self, outcome, detail, weights)
        if source is not None:
            self._trainer_scope.cancel()

    async def export(self) -> bytes:
        """This node's stage as a safetensors file. Raises StageFailed."""
        if self._replica is None:
            raise StageFailed("no stage is open here")
        return await self._replica.export()

    def heard(self) -> None:
        """The trainer says that the run goes on."""
        self._heard = self._service.seams.clock.monotonic()

    async def _give_up_on_silence(self) -> None:
        while not self._is_ended:
            await trio.sleep(RENEW_SECONDS)
            if self.begun or self._is_opening or self._is_replanning:
                self.heard()
            silence = self._service.seams.clock.monotonic() - self._heard
            if silence >= self.SILENCE_SECONDS_MAX:
                await self.end("failed", f"nothing was heard of the run for {silence:.0f} s", "")
            elif silence >= TRAINER_SILENCE_SECONDS_MAX:
                self._replan_without({self.plan.trainer} if self.plan is not None else set())

    # What comes in

    def receive(self, now: float, sender: PeerId, message: Any) -> None:
        """A pipeline message of the plan in force, or one before it. Raises RemoteProtocolError."""
        if isinstance(message, Notice):
            if self.plan is None or sender != self.plan.trainer or message.event.run != self.run.text:
                raise RemoteProtocolError("a notice from a peer that is not the run's trainer")
            check_notice(message)
            self._heard = now
            # By our own clock: another's may be wrong, and this one's screens sort by it.
            at = self._service.seams.clock.wall()
            self._service.publish(msgspec.structs.replace(message.event, at=at))
        elif isinstance(message, ReplicaMessage):
            if self._trainer is not None:
                self._trainer.receive(now, sender, message)
        elif self._replica is not None:
            self._replica.receive(now, sender, message)

    def reconnected(self, peer: PeerId) -> None:
        """A link to `peer` was opened anew."""
        if self._replica is not None:
            self._replica.reconnected(peer)
        if self._trainer is not None:
            self._trainer.reconnected(peer)

    def member_lost(self, peer: PeerId) -> None:
        """A member is dead or has left; `service.live()` no longer holds it."""
        if self.plan is None or peer not in self.plan.members:
            return
        if self._trainer is not None:
            self._trainer.drop(peer)
        if self.plan.trainer not in self._service.live():
            self._replan_without(set())
        elif peer == self.plan.planner and self.plan.trainer == self._me and not self.begun:
            # Its Begin will not come, and only the trainer knows that it has not.
            self._start_task(lambda: self._replan(set()))

    def _replan_without(self, silent: Set[bytes]) -> None:
        """If this is for this node to do."""
        assert self.plan is not None
        live = [peer for peer in self.plan.members if peer in self._service.live() and peer not in silent]
        if live and planner_of(live) == self._me:
            self._start_task(lambda: self._replan(silent))

    async def _replan(self, silent: Set[bytes]) -> None:
        """As the planner after a trainer's death: another trainer, the same stages."""
        if self._is_replanning or self._is_ended:
            return
        self._is_replanning = True
        try:
            await self._find_trainer(silent)
        finally:
            self._is_replanning = False

    async def _find_trainer(self, silent: Set[bytes]) -> None:
        assert self.plan is not None
        old = self.plan
        reason = "no member could train on"
        for candidate in sorted(old.members, key=lambda peer: (old.stage_of(peer) is not None, peer)):
            live = [peer for peer in old.members if peer in self._service.live() and peer not in silent]
            if candidate not in live:
                continue
            try:
                plan = plan_without(self.plan, self._me, candidate, live)
                await start_all(self.run, plan, self._service.ask, live)
                return
            except NotPlaced as error:
                reason = str(error)
        await self._finish(self.plan, "failed", f"the trainer is gone: {reason}", "")

    # Bookkeeping

    def _publish_and_notify(self, event: RunEvent) -> None:
        assert self.plan is not None
        self._service.publish(event)
        notice = Notice(plan_hash(self.plan), event)
        for peer in self._others(self.plan):
            self._service.send(peer, notice)

    def _start_task(self, task: Callable[[], Any]) -> None:
        assert self._service.nursery is not None
        self._service.nursery.start_soon(task)
