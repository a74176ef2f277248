"""Receives messages on `/peerloom/pipeline/2`: checks each and passes it to the member that it is for.

`partition.run.dispatch` finds that member, and keeps messages that arrive too early. Streams and limits are
handled here.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, Protocol

import trio

from crypto.encoding import decode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.errors import StreamClosed, Unreachable
from node.protocols import runs as wire
from node.protocols.manifest import Run
from node.runs.archive import ArchiveShell
from node.runs.member import RunMember
from node.seams import Seams, Stream
from partition.plan.paxos_messages import AGREEMENT_BYTES_MAX, AgreementMessage, ChainHead
from partition.plan.plan import HASH_BYTES
from partition.run.dispatch import Dispatch
from partition.run.settings import RunSettings
from partition.steps.frames import PAYLOAD_BYTES_MAX, Frame, OpenedFrame, open_frame

IDLE_SECONDS_MAX = 120.0
"""A stream without a message for this long is closed, unless its peer is in a run with this node."""
EARLY_BYTES_MAX = 16 * 1024
"""Maximum size of an early message. Anybody may send one, so it is small: a committer begins with a Sync, and
repeats later messages."""
NO_PAYLOAD = memoryview(b"")


class InboxService(Protocol):
    """The part of `node.runs.runs.Runs` that the inbox uses."""

    seams: Seams
    settings: RunSettings
    archive: ArchiveShell
    members: dict[bytes, RunMember]
    refuse: Callable[[PeerId, RemoteProtocolError], None]

    def containing(self, run: Run, place: str) -> AbstractContextManager[None]: ...
    def start_task(self, task: Callable[..., Any], *arguments: object, of: Run | None) -> None: ...
    async def ask(self, peer: PeerId, request: wire.Request, seconds: float) -> wire.Reply: ...


class PipelineInbox:
    """The inbox of one node for all its runs."""

    def __init__(self, runs: InboxService) -> None:
        self.dispatch: Dispatch[RunMember, bytes] = Dispatch()
        self._runs = runs
        self._telling: set[PeerId] = set()

    def follow(self, plan: bytes, member: RunMember) -> None:
        """Pass messages of this plan to `member`, beginning with those that arrived too early."""
        if late := self.dispatch.follow(plan, member):
            self._runs.start_task(self._deliver_late, late, of=member.run)

    async def serve(self, stream: Stream) -> None:
        """Receive a peer's messages until its stream ends."""
        try:
            while True:
                received = None  # also frees the last payload's memory while no message arrives
                with trio.move_on_after(IDLE_SECONDS_MAX):
                    received = await stream.receive_with_payload(PAYLOAD_BYTES_MAX)
                if received is not None:
                    await self.deliver(stream.peer, *received)
                elif not self._is_partner(stream.peer):
                    return
        except StreamClosed:
            return

    def _is_partner(self, peer: PeerId) -> bool:
        """Return whether `peer` has a part in a plan that is in force here."""
        members = self._runs.members.values()
        return any(member.plan is not None and peer in member.plan.members for member in members)

    async def deliver(self, sender: PeerId, data: bytes, payload: memoryview = NO_PAYLOAD) -> None:
        """Handle one message; an invalid one counts against its sender."""
        try:
            message: Any = decode(data, wire.PipelineMessage, bytes_max=wire.PIPELINE_BYTES_MAX)
            if isinstance(message, Frame):
                message = open_frame(sender, message, payload)
                plan = message.header.plan
            elif payload:
                raise RemoteProtocolError(f"{len(payload)} bytes of payload with a message that has none")
            elif isinstance(message, wire.GroupPart):
                message = message.part
                plan = message.key[:HASH_BYTES]
            elif isinstance(message, AgreementMessage):
                if len(data) > AGREEMENT_BYTES_MAX:
                    raise RemoteProtocolError(f"{len(data)} bytes about plans, at most {AGREEMENT_BYTES_MAX}")
                self._about_plans(sender, message)
                return
            else:
                plan = message.plan
            member = self.dispatch.find(sender, plan)
            if member is not None:
                await self._hand_over(member, sender, message)
            elif isinstance(message, wire.Early) and len(data) <= EARLY_BYTES_MAX:
                self.dispatch.keep(sender, plan, bytes(data))
        except RemoteProtocolError as error:
            self._runs.refuse(sender, error)

    async def _deliver_late(self, late: list[tuple[PeerId, bytes]]) -> None:
        for sender, data in late:
            await self.deliver(sender, data)
        await trio.lowlevel.checkpoint()

    async def _hand_over(self, member: RunMember, sender: PeerId, message: Any) -> None:
        """Pass a message to its run. Raises RemoteProtocolError."""
        refused = None
        with self._runs.containing(member.run, f"message {type(message).__name__}"):
            try:
                wire.check_step(message, member.steering.steps)
                if isinstance(message, OpenedFrame):
                    await member.take_frame(sender, message)
                else:
                    member.receive(self._runs.seams.clock.monotonic(), sender, message)
            except RemoteProtocolError as error:
                refused = error
        if refused is not None:
            raise refused

    def _about_plans(self, sender: PeerId, message: AgreementMessage) -> None:
        runs = self._runs
        member = runs.members.get(message.run)
        if member is not None:
            with runs.containing(member.run, f"message {type(message).__name__}"):
                member.receive(runs.seams.clock.monotonic(), sender, message)
        elif isinstance(message, ChainHead) and message.asks and sender not in self._telling:
            # A member that was away when a run ended still follows its last plan, and asks for newer ones.
            self._telling.add(sender)
            runs.start_task(self._tell_end, sender, runs.archive.told(message.run, message.plan), of=None)

    async def _tell_end(self, peer: PeerId, end: wire.End | wire.Stop | None) -> None:
        with suppress(Unreachable):
            if end is not None:
                await self._runs.ask(peer, end, self._runs.settings.end_seconds_max)
        self._telling.discard(peer)
