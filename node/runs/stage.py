"""The stage process of one run: the driver of a member's `partition.run.hosting.Hosting`.

Only for `node.runs.member`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

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
from node.runs.context import RunService
from node.seams import Stage
from partition.plan.plan import FIRST_VALUES, Plan, plan_hash
from partition.run import hosting as core
from partition.steps.frames import OpenedFrame


class StageHosting:
    """The host of at most one stage process. `failed` is called with the reason if this node cannot hold its
    stage, and `abandoned` if the plan for which the stage was opened was not decided."""

    def __init__(
        self,
        service: RunService,
        run: Run,
        hosting: core.Hosting,
        *,
        holders: Callable[[], Sequence[PeerId]],
        failed: Callable[[str], None],
        abandoned: Callable[[], None],
        save: Save,
        restore: Restore,
    ) -> None:
        """Prepare a host. `holders` may provide the run's model and data; `save` and `restore` are as in
        ReplicaShell."""
        self.replica: ReplicaShell | None = None
        self.machine: Machine | None = None
        """The machine resources that the slot gave when the stage was opened."""
        self.core = hosting
        self._service = service
        self._run = run
        self._holders = holders
        self._failed = failed
        self._abandoned = abandoned
        self._save = save
        self._restore = restore
        self._scope = trio.CancelScope()
        self._changing = trio.Lock()

    def act(self, wanted: core.StageAction | None) -> None:
        """Keep, open or close this node's stage for a plan that came into force."""
        if isinstance(wanted, core.StageKept) and self.replica is not None:
            self._service.spans.admit(wanted.plan)
            self.replica.adopt(wanted.plan)
        elif isinstance(wanted, core.StageWanted | core.StageEnded):
            self._service.start_task(self._change, wanted, of=self._run)

    async def prepare(self, plan: Plan, planner: PeerId) -> str | None:
        """Open the stage of a plan that is not in force yet, as `planner` asks. Return None once the stage is
        open, else the reason why it is not."""
        wanted = self.core.prepare(self._service.seams.clock.monotonic(), plan, planner)
        if wanted is None:
            return core.NO_ROOM
        reason = await self._open_early(wanted)
        if reason is not None:
            self._service.start_task(self.unprepare, plan_hash(plan), of=self._run)
        return reason

    async def abandon(self) -> None:
        """Close the stage that was opened for a plan that was not decided."""
        await self._close()
        self._abandoned()

    async def _open_early(self, wanted: core.StageWanted) -> str | None:
        async with self._changing:
            await self._close()
            try:
                is_open = await self._open(wanted)
            except StageFailed as error:
                return str(error)
            except Exception as error:
                # The planner must do without this node, which gives up what it accepted for the plan.
                note(error, "a stage that was to be opened")
                return f"an internal error: {describe(error)}"
            finally:
                self.core.failed(wanted)
        return None if is_open else core.WENT_ON

    async def unprepare(self, plan: bytes) -> None:
        """Close the stage that was opened for this plan, because the plan was not decided."""
        if self.core.unprepare(plan) is not None:
            await self.abandon()

    async def planner_lost(self, planner: PeerId) -> None:
        """Close the stage that was opened for an undecided plan of `planner`, because that peer is gone."""
        if self.core.planner_lost(planner) is not None:
            await self.abandon()

    async def take(self, sender: PeerId, frame: OpenedFrame) -> None:
        """Pass an incoming frame to the stage once there is memory to keep it; if there is none, the stage
        fails. Raises RemoteProtocolError."""
        plan = self.core.plan
        kept: OpenedFrame | None = frame
        if self.replica is not None and plan is not None and sender in plan.members:
            kept = await self.replica.keep(frame)  # frames from other peers will be refused
        if kept is not None and self.replica is not None:
            self.replica.receive(self._service.seams.clock.monotonic(), sender, kept)

    async def _change(self, wanted: core.StageWanted | core.StageEnded) -> None:
        async with self._changing:
            if self.core.is_open or (isinstance(wanted, core.StageWanted) and not self.core.wants(wanted)):
                return  # a newer plan came into force first
            if isinstance(wanted, core.StageEnded):
                await self._close()
                return
            self._service.publish_lease(self._run, wanted.plan, wanted.held.number)
            past = self._stop()
            try:
                await self._open(wanted, None if past is None else past.stage)
            except StageFailed as error:
                if self.core.wants(wanted):
                    self._failed(str(error))
            finally:
                self.core.failed(wanted)
                if past is not None:
                    with trio.CancelScope(shield=True):
                        await past.aclose()

    async def _open(self, wanted: core.StageWanted, past: Stage | None = None) -> bool:
        """Open a stage, in the process of the `past` stage if possible. Return whether the new stage was
        still wanted once it was open. Raises StageFailed."""
        service, manifest = self._service, self._run.manifest
        executor = service.seams.executor
        if past is None:
            service.readiness.expect()  # loads the stage's process while the graph is fetched
        try:
            graph = await service.models.get(manifest.graph_hash, self._holders())
            # The node's own graph need not be fenced in.
            is_own = self._run.requester == service.signer.peer
            machine = replace(service.machine, allow_unfenced=service.machine.allow_unfenced or is_own)
            self.machine = machine
            build = partial(build_stage_spec, self._run, graph, wanted.plan, wanted.held.number, machine)
            specification, parts, data = await executor.run(build, apart=True)
            opened = await (executor.replace_stage(past, data) if past else executor.open_stage(data))
        except Unreachable as error:
            raise StageFailed(error.detail) from None
        except RemoteProtocolError as error:
            raise StageFailed(f"no stage can be created from this plan: {error}") from None
        except OSError as error:
            raise StageFailed(f"no process can be started: {error}") from None
        try:
            if wanted.step is not None or wanted.plan.restored == FIRST_VALUES:
                await service.models.fill(opened, specification, self._holders())
        except BaseException:
            await opened.aclose()
            raise
        plan = self.core.opened(wanted)
        if plan is None:
            with trio.CancelScope(shield=True):
                await opened.aclose()
            return False
        shell = service.seams.part(ReplicaShell)(
            service.signer,
            plan,
            specification,
            parts,
            opened,
            service.seams,
            service.send,
            refuse=service.refuse,
            step=wanted.step,
            in_flight_max=manifest.microbatches,
            schedule=manifest.pipeline,
            codecs=LinkCodecs(manifest.frames, service.link_rate, executor),
            save=self._save,
            restore=self._restore,
            spans=service.spans,
            archive=service.audits.archive,
            frames_bytes_max=service.limits.frames_bytes_max,
        )
        service.spans.admit(plan)
        self.replica = shell
        self._scope = trio.CancelScope()
        service.start_task(self._host, shell, self._scope, of=self._run)
        return True

    async def _host(self, shell: ReplicaShell, scope: trio.CancelScope) -> None:
        with scope:
            await shell.run()
        if self.replica is shell:
            self.core.closed()
            await self._close()

    async def export(self) -> bytes:
        """Return the stage as a safetensors file. Raises StageFailed."""
        if self.replica is None:
            raise StageFailed("no stage is open here")
        return await self.replica.export()

    async def read_state(self, request: FetchState) -> bytes | None:
        """Return a range of the stage's state; None if the stage is not at the requested step. Raises
        StageFailed."""
        return None if self.replica is None else await self.replica.read_state(request)

    async def _close(self) -> None:
        """End the stage process, if there is one."""
        if (shell := self._stop()) is not None:
            with trio.CancelScope(shield=True):
                await shell.aclose()

    def _stop(self) -> ReplicaShell | None:
        """Detach the stage, so that it no longer answers; return it for closing."""
        shell, self.replica = self.replica, None
        if shell is not None:
            self._scope.cancel()
        return shell

    async def vacate(self) -> None:
        """Close the stage although the plan still assigns it to this node; it may be opened again later."""
        self.core.vacate()
        await self._close()

    async def end(self) -> None:
        """Close the stage and open no other, because the run has ended."""
        self.core.end()
        await self._close()
