"""All runs in local mode that this node knows. It joins them on request, and ends them.

They share the node's one slot with stages of exact runs (`hosts`).
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial

import trio
from msgspec.structs import replace

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact
from crypto.identity import PeerId
from node.averaging.door import TicketGate
from node.checkpoints.weights import has_result
from node.errors import Unreachable, UsageError
from node.events import RunAccepted, RunChanged, RunEnded, RunReleased
from node.local.context import LocalRunsService
from node.local.keeper import release
from node.local.member import LocalMember
from node.local.saved import forget, saved_runs
from node.local.stage_server import STREAMS
from node.local.stages import local_plan, stage_count
from node.placement.lease_checks import LeaseChecks
from node.placement.leases import PlacementFailed
from node.protocols import runs as wire
from node.protocols.manifest import Run, check_run, run_text
from node.result_events import ResultDiffers
from node.runs.archive import ArchiveShell
from node.seams import Stream
from node.services.driver import Driver
from partition.run import admission as admissions
from partition.run import conclusions as core
from partition.run.admission import Admission, Joins
from partition.run.asks import Declined, Done
from partition.run.ending import Ending
from partition.run.endings import Endings
from partition.run.local import column_messages as column
from partition.run.messages import REASON_LENGTH_MAX

GREETINGS = 10
GREET_SECONDS = 1.0
"""Seconds between the messages in which a node that comes back shows its tickets to its former members, and
the number of these messages."""
PLACE_SECONDS = 30.0
"""Least time that a requester without stages waits for the first training member."""


class LocalRuns:
    """The service for local mode. It belongs to `node.runs.runs.Runs` and uses its parts."""

    def __init__(self, service: LocalRunsService, archive: ArchiveShell) -> None:
        self.members: dict[bytes, LocalMember] = {}
        self._service = service
        self._archive = archive
        seams = service.seams
        self._checks = LeaseChecks(service.signer.peer, seams.executor, seams.clock, lambda: service.machine)
        self._endings = Endings()
        self._joins = Joins()
        self._driver = Driver(
            self._endings,
            core.PROTOCOL,
            core.Message,
            message_bytes_max=core.MESSAGE_BYTES_MAX,
            network=seams.network,
            clock=seams.clock,
            publish=self._on_event,
            refuse=service.refuse,
        )
        self.run = self._driver.run
        seams.network.handle(column.PROTOCOL, self._serve_column, STREAMS)

    def run_of(self, key: bytes) -> tuple[bytes, PeerId] | None:
        """Return the run that averages under this key, with its requester; None if this node knows no such
        run."""
        for member in self.members.values():
            if any(part.key == key for part in member.crew.parts):
                return member.run.id, member.run.requester
        return None

    @property
    def hosts(self) -> bool:
        """Whether this node trains in a run in local mode."""
        return any(member.crew.is_training for member in self.members.values())

    async def submit(self, run: Run, *, wait_seconds: float = 0.0) -> None:
        """Begin a run that this node requests. Raises PlacementFailed if nobody trains in it within
        `wait_seconds`, or within PLACE_SECONDS if that is longer."""
        service = self._service
        free = {offer.peer for offer in service.places.preferred(run, service.offers())}
        is_training = service.has_slot and service.accepts(run) is None and service.signer.peer in free
        member = self._begin(run, is_training=is_training, holders=[])
        with trio.move_on_after(max(PLACE_SECONDS, wait_seconds)):
            await member.begun.wait()
        if member.reason or not member.begun.is_set():
            reason = member.reason or "no known node takes part"
            await self.end(member, "failed", reason, "")
            raise PlacementFailed(reason)

    async def resume(self) -> None:
        """Rejoin the runs that this node was in when it was stopped. At most one of them trains here."""
        service, storage = self._service, self._service.seams.storage
        for run, saved in list(saved_runs(storage, service.signer, service.seams.swarm_clock.wall())):
            if service.is_over(run.id) or run.id in self.members:
                forget(storage, run.text)
                continue
            others = [PeerId(peer) for peer in saved.members]
            is_training = saved.is_training and service.has_slot
            member = self._begin(
                run,
                is_training=is_training,
                holders=others,
                chain=saved.chain,
                stage=saved.stage,
                revoked=saved.revoked,
                is_resumed=True,
            )
            # If the run has ended meanwhile, its former members still report this for a while.
            self._command(member.ending, partial(member.ending.set_peers, peers=others))
            service.start_task(self._return, member.admission, others, of=run)

    async def _return(self, admission: Admission, peers: Sequence[PeerId]) -> None:
        """Announce repeatedly to the former members that this node is back, while it looks for them."""
        for _ in range(GREETINGS):
            self._greet(admission, peers)
            await trio.sleep(GREET_SECONDS)

    def _greet(self, admission: Admission, peers: Collection[PeerId]) -> None:
        """Show this node's proof of membership to members."""
        self._driver.command(lambda _: self._endings.admitted(admission, admission.greet(peers)))

    async def join(self, peer: PeerId, request: wire.Join) -> wire.Reply:
        """Answer a member of a run that asks this node to take part. Raises RemoteProtocolError."""
        service, chain = self._service, request.chain
        run = check_run(service.signer, request.manifest)
        if run.manifest.local is None or request.stage >= stage_count(run):
            raise RemoteProtocolError(
                "asked to join a run that is not in local mode, or for a stage that it does not have"
            )
        wall = service.seams.swarm_clock.wall()
        self._joins.check(service.signer, run.id, run.requester, chain, peer, wall)
        if service.is_over(run.id):
            return Declined("the run is over")
        if run.id in self.members:
            if request.is_beside:
                return await self.members[run.id].stand_in(peer, request.stage)
            # In a run with columns the asking member wants a stage for itself.
            return Done() if stage_count(run) == 1 else Declined("it is a member already")
        if not service.has_slot:
            return Declined("busy")
        reason = service.accepts(run)
        if reason is None:
            try:
                graph = await service.models.get(run.manifest.graph_hash, [peer, run.requester])
            except Unreachable as error:
                return Declined(error.detail[:REASON_LENGTH_MAX])
            try:
                plan = await service.seams.executor.run(
                    partial(local_plan, run, graph, service.signer.peer), apart=True
                )
            except ValueError as error:
                return Declined(str(error)[:REASON_LENGTH_MAX])
            reason = await self._checks.rejection_reason(peer, run, graph, plan, request.stage)
        if reason is None:
            reason = await service.own_data.refusal(run, graph)
        if reason is not None:
            return Declined(reason[:REASON_LENGTH_MAX])
        return self._take(run, peer, request)

    def _take(self, run: Run, peer: PeerId, request: wire.Join) -> wire.Reply:
        """Take part, unless a different run got the slot while this one was being checked."""
        if not self._service.has_slot:
            return Declined("busy")
        self._begin(
            run, is_training=True, holders=[peer], chain=request.chain, stage=request.stage, inviter=peer
        )
        return Done()

    def _begin(
        self,
        run: Run,
        *,
        is_training: bool,
        holders: list[PeerId],
        chain: Sequence[Fact] = (),
        stage: int = 0,
        inviter: PeerId | None = None,
        revoked: Sequence[Fact] = (),
        is_resumed: bool = False,
    ) -> LocalMember:
        service, manifest = self._service, run.manifest
        assert manifest.local is not None, "a run in local mode"
        ending = Ending(service.signer.peer, run.id, manifest.local, manifest.steps, run.requester)
        wall = service.seams.swarm_clock.wall()
        admission = Admission(service.signer, run.id, run.requester, chain, wall=wall, revocations=revoked)
        now = service.seams.clock.monotonic()
        self._endings.open(now, ending, admission)
        show, greet = partial(self._show, admission), partial(self._greet, admission)
        door = TicketGate(admission, service.seams.swarm_clock, show, greet)
        member = self.members[run.id] = LocalMember(
            service,
            run,
            ending,
            door,
            stage,
            is_training=is_training,
            holders=holders,
            tell=self._command,
            inviter=inviter,
            is_resumed=is_resumed,
        )
        service.note_guests()
        service.receipts.begun(run.id)
        service.publish(
            RunAccepted(
                at=service.seams.clock.wall(),
                run=run.text,
                model=manifest.model,
                data=manifest.data,
                steps=manifest.steps,
                requester=run.requester,
                metrics=manifest.metrics,
            )
        )
        service.start_task(self._live, member, of=run)
        return member

    async def _live(self, member: LocalMember) -> None:
        is_own = member.run.requester == self._service.signer.peer
        had_others = await member.live()
        while (states := member.successor) is not None and self.members.get(member.run.id) is member:
            member = self.members[member.run.id] = await member.as_head(states)
            had_others = await member.live()
        if is_own and had_others and member.crew.is_training and not member.is_over:
            member.crew.is_training = False  # the others continue to train, and this node only follows
            await member.live()
        if member.is_over or self.members.get(member.run.id) is not member:
            return
        if is_own:
            await self.end(member, "failed", member.reason, "")
        else:
            self._left(member)

    def _left(self, member: LocalMember) -> None:
        """Leave a run in which this node cannot continue; the other members continue."""
        run, wall = member.run, self._service.seams.clock.wall()
        self.members.pop(run.id, None)
        self._service.receipts.ended(run.id)
        self._service.own_data.release(run.id)
        release(self._service, run)
        self._endings.close(run.id)
        changed = RunChanged(at=wall, run=run.text, state="failed", reason=member.reason[:REASON_LENGTH_MAX])
        self._service.publish(changed)
        self._service.publish(RunReleased(at=wall, run=run.text))

    async def _serve_column(self, stream: Stream) -> None:
        """Answer a head that requests this node's stage."""
        attach: column.Question = decode(
            await stream.receive(), column.Question, bytes_max=column.MESSAGE_BYTES_MAX
        )
        member = self.members.get(attach.run) if isinstance(attach, column.Attach) else None
        if member is not None and member.crew.server is not None and isinstance(attach, column.Attach):
            if member.admission.admits(stream.peer):
                member.heads.seen(self._service.seams.clock.monotonic())
            server = member.crew.serving(attach.stage) or member.crew.server
            await server.serve(stream, attach)
            return
        refusal = column.ColumnRefusal("no stage of this run is held on this node")
        if member is not None and member.admission.admits(stream.peer):
            mates = [peer for peer in member.crew.holders if peer != stream.peer]
            refusal = replace(refusal, mates=tuple(mates[-column.MATES_MAX :]))
        await stream.send(encode(refusal))

    # Ending

    def _command(self, ending: Ending, order: Callable[[float], core.Sends]) -> None:
        self._driver.command(lambda now: self._endings.drained(ending, order(now)))

    def _show(self, admission: Admission, peers: Collection[PeerId]) -> None:
        """Show this member's ticket chain to peers that claim to be members."""
        self._driver.command(lambda now: self._endings.admitted(admission, admission.show(now, peers)))

    def _on_event(self, event: core.Event) -> None:
        if isinstance(event, core.Differs):
            self._service.start_task(self._differs, event, of=None)
            return
        member = self.members.get(event.run)
        if member is None or member.is_over:
            return
        match event:
            case core.EvaluationHeard():
                member.evaluation_heard(event.evaluated)
            case core.Preferred():
                self._service.start_task(member.results.fetch, event.conclusion, of=member.run)
            case core.Settled():
                found = event.conclusion
                end = partial(self.end, member, found.outcome, found.reason, found.weights, for_all=True)
                self._service.start_task(end, of=member.run)
            case admissions.PeerAdmitted(peer=peer):
                member.admitted(peer)
            case admissions.Expelled(peer=peer, reason=reason):
                self._expelled(member, peer, reason)
            case core.Voided():
                pass

    def _expelled(self, member: LocalMember, peer: PeerId, reason: str) -> None:
        """Stop averaging with a member whose tickets have expired or were revoked."""
        if peer == self._service.signer.peer:
            member.cancel(f"this node may no longer take part: {reason}")
            return
        crew = member.crew
        for part in crew.parts:
            part.expelled(peer, reason)
        if crew.column is not None:
            self._service.start_task(crew.column.expel, peer, of=member.run)
        for server in crew.servers:
            server.seat.expel(peer)

    async def revoke(self, text: str, peer: PeerId) -> int:
        """Revoke a member's tickets for a run of this node; return how many were told. Raises UsageError."""
        member = next(each for each in self.members.values() if each.run.text == text)
        admission, wall = member.admission, self._service.seams.swarm_clock.wall()
        if not admission.is_requester:
            raise UsageError(
                f"run {text[:8]} belongs to another node",
                "only its requester can revoke; to leave: `peerloom runs drop`",
            )
        if peer == self._service.signer.peer:
            raise UsageError(
                f"this node itself requested run {text[:8]}", f"use `peerloom runs stop {text[:8]}` to end it"
            )
        told = len(set(admission.admitted) - {peer})
        self._driver.command(lambda _: self._endings.admitted(admission, admission.revoke(peer, wall)))
        await member.keeper.remember(member.keeper.part(is_training=member.crew.is_training))
        return told

    async def _differs(self, event: core.Differs) -> None:
        run, weights = run_text(event.run), event.other.weights
        if await self._archive.differ(run, event.peer, weights):
            at = self._service.seams.clock.wall()
            self._service.publish(ResultDiffers(at=at, run=run, peer=event.peer, weights=weights))

    async def end(
        self, member: LocalMember, outcome: str, detail: str, weights: str, *, for_all: bool = False
    ) -> None:
        """End a run here: close its stage, record the outcome, and announce it."""
        service, run = self._service, member.run
        if self.members.get(run.id) is not member:
            return
        del self.members[run.id]
        service.receipts.ended(run.id)
        service.own_data.release(run.id)
        release(service, run)
        if not member.ending.is_settled:
            self._endings.close(run.id)
        member.cancel()
        storage = service.seams.storage
        is_here = bool(weights) and await service.seams.executor.run(partial(has_result, storage, run.text))
        await self._archive.note(
            run,
            member.teller.shown,
            outcome,
            detail,
            weights,
            is_here=is_here,
            stop=member.stopped_by,
            for_all=for_all,
        )
        service.publish(
            RunEnded(
                at=service.seams.clock.wall(),
                run=run.text,
                outcome=outcome,
                detail=detail,
                weights=weights,
                is_here=is_here,
            )
        )
        if outcome == "done" and is_here:
            service.start_task(service.provide, run.text, weights, of=None)

    async def give_up(self, run: bytes, outcome: str, detail: str) -> None:
        """End a run here without a result, if this node is in it."""
        member = self.members.get(run)
        if member is not None:
            await self.end(member, outcome, detail, "")

    async def stop(self, run: bytes, fact: Fact, detail: str) -> None:
        """End a run here that its requester has stopped."""
        member = self.members.get(run)
        if member is not None:
            member.stopped_by = fact
            await self.end(member, "stopped", detail, "", for_all=True)

    async def leave(self) -> None:
        """Leave all runs, because this node leaves the swarm."""
        for member in list(self.members.values()):
            member.cancel()
