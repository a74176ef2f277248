"""The stage of one run that this node holds: opened, kept under plan after plan, and closed.

Only for `node.runs.member`, which says what plan is in force.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import trio

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.containment import describe, note
from node.errors import StageFailed, Unreachable
from node.pipeline.codec_choice import LinkCodecs
from node.pipeline.replica import ReplicaShell, Restore, Save
from node.placement.admission import Machine, build_stage_spec
from node.protocols.manifest import Run
from node.protocols.runs import FetchState
from node.runs.context import Service
from partition.plan.plan import FIRST_VALUES, Plan, plan_hash
from partition.run import timeouts
from partition.steps.frames import OpenedFrame


class Held(NamedTuple):
    """A stage by its number and where the model is cut: elsewhere it is another stage, whose inputs or tied
    weights may differ also where its layers are the same."""

    number: int
    cuts: tuple[int, ...]


def held_in(plan: Plan, peer: PeerId) -> Held | None:
    """Return what a plan gives to a peer, None for no stage."""
    number = plan.stage_of(peer)
    if number is None:
        return None
    return Held(number, tuple(stage.last_layer for stage in plan.stages))


class Hosting:
    """At most one stage process. `failed` is told why this node cannot hold the stage it was given, and
    `abandoned` that the plan it was opened for did not come about."""

    def __init__(
        self,
        service: Service,
        run: Run,
        *,
        holders: Callable[[], Sequence[PeerId]],
        failed: Callable[[str], None],
        abandoned: Callable[[], None],
        save: Save,
        restore: Restore,
    ) -> None:
        """`holders` may hand over what the run is made of; for `save` and `restore` see ReplicaShell."""
        self.replica: ReplicaShell | None = None
        self.is_opening = False
        self.machine: Machine | None = None
        """What the slot gave when the stage was opened."""
        self._is_due = False
        self._service = service
        self._run = run
        self._holders = holders
        self._failed = failed
        self._abandoned = abandoned
        self._save = save
        self._restore = restore
        self._plan: Plan | None = None
        self._held: Held | None = None
        self._scope = trio.CancelScope()
        self._changing = trio.Lock()
        self._is_over = False
        self._prepared: bytes | None = None
        self._planner: PeerId | None = None

    def adopt(self, plan: Plan) -> None:
        """A plan is in force: keep the stage it gives to this node, open it, or close what was open."""
        # What has trained is opened again: first values are made in a new process.
        is_anew = plan.restored == FIRST_VALUES and self._prepared != plan_hash(plan)
        self._plan, self._prepared = plan, None
        stage = held_in(plan, self._service.signer.peer)
        if stage == self._held and not is_anew:
            if self.replica is not None:
                self._service.spans.admit(plan)
                self.replica.adopt(plan)
                return
            if self.is_opening or stage is None:
                return  # once open it takes the newest plan
        self._held = stage
        self._is_due = stage is not None
        # Only the first plan finds everybody at the beginning; whoever comes later has nothing yet.
        self._service.start_task(self._change, plan, stage, None if plan.height else 0, of=self._run)

    def occupies(self) -> bool:
        """Return whether a slot is taken by this run: a stage is open, is being opened, or is to be."""
        return self.replica is not None or self.is_opening or (self._is_due and not self._is_over)

    async def prepare(self, plan: Plan, planner: PeerId) -> str | None:
        """Open the stage of a plan that is not in force yet, as `planner` asks. Return None when it is open,
        else why it is not."""
        self._planner = planner
        reason = await self._open_early(plan)
        then = self._expire if reason is None else self.unprepare
        self._service.start_task(then, plan_hash(plan), of=self._run)
        return reason

    async def _expire(self, plan: bytes) -> None:
        """Close a prepared stage after a while: its planner may have died before the plan was decided."""
        await trio.sleep(timeouts.SILENCE_SECONDS_MAX)
        await self.unprepare(plan)

    async def _open_early(self, plan: Plan) -> str | None:
        stage = held_in(plan, self._service.signer.peer)
        async with self._changing:
            if self.replica is not None or stage is None or self._is_over:
                return "another stage is open here"
            self.is_opening = True
            self._prepared, self._held, self._plan = plan_hash(plan), stage, plan
            try:
                await self._open(plan, stage, None)
            except StageFailed as error:
                self._held = None
                return str(error)
            except Exception as error:
                # The planner must do without this node, and this node gives up what it accepted for the plan.
                note(error, "a stage that was to be opened")
                self._held = None
                return f"an internal error: {describe(error)}"
            finally:
                self.is_opening = False
        return None

    async def unprepare(self, plan: bytes) -> None:
        """Close what was opened for this plan, which did not come about."""
        if self._prepared == plan:
            self._prepared, self._held = None, None
            await self.close()
            self._abandoned()

    async def planner_lost(self, planner: PeerId) -> None:
        """Close what was opened for a plan that `planner` would have had decided; the peer is gone."""
        if self._prepared is not None and planner == self._planner:
            await self.unprepare(self._prepared)

    async def keep(self, sender: PeerId, frame: OpenedFrame) -> OpenedFrame | None:
        """A frame that has come, in memory it may stay in; None where there is none, and the stage fails."""
        if self.replica is None or self._plan is None or sender not in self._plan.members:
            return frame  # it will be dropped or refused, so it need not be put anywhere
        return await self.replica.keep(frame)

    async def _change(self, plan: Plan, stage: Held | None, step: int | None) -> None:
        async with self._changing:
            await self.close()
            if stage is None or self._is_over or stage != self._held:
                return
            self.is_opening, self._is_due = True, False
            self._service.publish_lease(self._run, plan, stage.number)
            try:
                await self._open(plan, stage, step)
            except StageFailed as error:
                self._failed(str(error))
            finally:
                self.is_opening = False

    async def _open(self, plan: Plan, stage: Held, step: int | None) -> None:
        service, manifest = self._service, self._run.manifest
        executor = service.seams.executor
        try:
            graph = await service.models.get(manifest.graph_hash, self._holders())
            # A graph of one's own has no need to be fenced in.
            is_own = self._run.requester == service.signer.peer
            machine = replace(service.machine, allow_unfenced=service.machine.allow_unfenced or is_own)
            self.machine = machine
            wanted = partial(build_stage_spec, self._run, graph, plan, stage.number, machine)
            specification, parts, data = await executor.run(wanted, apart=True)
            opened = await executor.open_stage(data)
        except Unreachable as error:
            raise StageFailed(error.detail) from None
        except RemoteProtocolError as error:
            raise StageFailed(f"no stage can be made of this plan: {error}") from None
        except OSError as error:
            raise StageFailed(f"no process can be started: {error}") from None
        try:
            if step is not None or plan.restored == FIRST_VALUES:
                await service.models.fill(opened, specification, self._holders())
            if self._is_over or self._plan is None or self._held != stage:
                raise StageFailed("the run went on before its stage was open")
        except BaseException:
            await opened.aclose()
            raise
        shell = ReplicaShell(
            service.signer,
            self._plan,
            specification,
            parts,
            opened,
            service.seams,
            service.send,
            step=step,
            in_flight_max=manifest.microbatches,
            schedule=manifest.pipeline,
            codecs=LinkCodecs(manifest.frames, service.link_rate, executor),
            save=self._save,
            restore=self._restore,
            spans=service.spans,
        )
        service.spans.admit(self._plan)
        self.replica = shell
        self._scope = trio.CancelScope()
        service.start_task(self._host, shell, self._scope, of=self._run)

    async def _host(self, shell: ReplicaShell, scope: trio.CancelScope) -> None:
        with scope:
            await shell.run()
        if self.replica is shell:
            await self.close()

    async def export(self) -> bytes:
        """The stage as a safetensors file. Raises StageFailed."""
        if self.replica is None:
            raise StageFailed("no stage is open here")
        return await self.replica.export()

    async def read_state(self, request: FetchState) -> bytes | None:
        """A range of the stage's state, None where it is not that of the step. Raises StageFailed."""
        return None if self.replica is None else await self.replica.read_state(request)

    async def close(self) -> None:
        """End the stage process, if there is one."""
        shell, self.replica = self.replica, None
        if shell is not None:
            self._scope.cancel()
            with trio.CancelScope(shield=True):
                await shell.aclose()

    async def vacate(self) -> None:
        """Close the stage, though the plan still gives it to this node: it may be given to it again later."""
        self._held, self._is_due = None, False
        await self.close()

    async def end(self) -> None:
        """The run is over: close the stage, and open none again."""
        self._is_over = True
        await self.close()
