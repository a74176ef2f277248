"""The shell around a `partition.plan.paxos.PaxosChain`: one run's chain of plans on this node.

Its promises are on disk before they are sent, beside the history of the plans for newcomers. One task handles
incoming messages strictly in order.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.protocols.manifest import Run
from node.runs.context import Service
from node.seams import Storage, own_rng
from node.waker import Waker
from partition.plan.change import CHANGE_BYTES_MAX, Change, encode_change
from partition.plan.history import CHANGES_MAX, HISTORY_BYTES_MAX, SEGMENTS_MAX, History, extend
from partition.plan.paxos import PaxosChain
from partition.plan.paxos_messages import LINKS_BYTES_MAX, Link
from partition.plan.plan import Hash, Height, Plan

ENTERED_BYTES_MAX = 2 * HISTORY_BYTES_MAX + LINKS_BYTES_MAX + 64 * 1024
"""The size limit of this node's own file: a history and the later changes, the last of which may be many."""
QUEUE_MAX = 4_096
"""Messages that wait for the disk; more are dropped, as a lossy network would drop them."""


def chain_name(run: str) -> str:
    """Return the storage name of this node's promises in a run."""
    return f"runs/{run}/chain"


def history_name(run: str) -> str:
    """Return the storage name of the history by which this node entered a run, and of later changes."""
    return f"runs/{run}/history"


class Entered(msgspec.Struct, frozen=True, array_like=True):
    """The way a node entered a run: the history that admitted it, the height and hash of the plan that this
    ends with, and the changes since."""

    history: History
    height: Height
    plan: Hash
    links: tuple[Link, ...] = ()


def read_entered(storage: Storage, run: str) -> Entered:
    """Read the stored entry of a run. Raises RemoteProtocolError: there is none, or it is damaged."""
    data = storage.read(history_name(run)) or b""
    entered: Entered = decode(data, Entered, bytes_max=ENTERED_BYTES_MAX)
    return entered


class ChainShell:
    """Agreement on plans; `on_event` is called for each decided plan, after it is on disk here.

    `entered` is the history by which this node entered the run, with the decisions it knows of since.
    """

    def __init__(
        self,
        service: Service,
        run: Run,
        plan: Plan,
        *,
        entered: Entered,
        durable: bytes = b"",
        may_fork: bool,
        tie_breaker: PeerId | None = None,
        on_event: Callable[[Any], None],
    ) -> None:
        seams, me = service.seams, service.signer.peer
        self.core: PaxosChain = seams.core(
            PaxosChain,
            me,
            plan,
            own_rng(seams.rng),
            durable=durable,
            may_fork=may_fork,
            tie_breaker=tie_breaker,
        )
        self._signer = service.signer
        self._run = run.text
        self._entered = entered
        self._seams = seams
        self._send = service.send
        self._on_event = on_event
        self._refuse = service.refuse
        self._waiting: deque[Callable[[float], list[tuple[PeerId, Any]]]] = deque()
        self._waker = Waker(seams.clock, lambda: self.core.deadline)

    @property
    def head(self) -> Plan:
        """The newest plan known to be decided."""
        return self.core.head

    def receive(self, sender: PeerId, message: Any) -> None:
        """Queue a message about the chain, from anybody: it is checked, or refused, when its turn comes."""
        self._do(lambda now: self._checked(now, sender, message))

    def _checked(self, now: float, sender: PeerId, message: Any) -> list[tuple[PeerId, Any]]:
        try:
            return list(self.core.receive(now, sender, message))
        except RemoteProtocolError as error:
            self._refuse(sender, error)
            return []

    def wish(self, change: Change | None, parent: bytes) -> None:
        """Propose a change to be decided after the plan `parent`; None to propose nothing."""
        self._do(lambda now: self.core.wish(now, change, parent=parent))

    def reach(self, live: Collection[PeerId]) -> None:
        """Tell the core which peers are now believed to be alive."""
        self._do(lambda now: self.core.reach(now, live))

    def tell(self, peer: PeerId) -> None:
        """Exchange missing parts of the chain with a peer."""
        for receiver, message in self.core.tell(peer):
            self._send(receiver, message)

    def history(self, plan: Plan, change: Change | None = None) -> History:
        """Return how `plan` came about, for a newcomer: it is decided, or `change` would lead to it.

        Raises RemoteProtocolError: the run has had too many changes to send.
        """
        self._note_links()
        entered = self._entered
        if plan.height == 0:
            return entered.history
        count = plan.height - entered.height - (change is not None)
        if not 0 <= count <= len(entered.links):
            raise RemoteProtocolError("the run has seen more changes than anybody can be told")
        links = [*entered.links[:count], *([] if change is None else [encode_change(change)])]
        return extend(self._signer, entered.history, entered.plan, links)

    @property
    def can_tell(self) -> bool:
        """Return whether a newcomer could be sent the next plan's history: a run has a limited number of
        changes."""
        self._note_links()
        entered, head = self._entered, self.core.head
        size = entered.history.size_bytes + sum(map(len, entered.links)) + CHANGE_BYTES_MAX
        return (
            head.height < min(CHANGES_MAX, entered.height + len(entered.links) + 1)
            and size < HISTORY_BYTES_MAX
            and len(entered.history.segments) < SEGMENTS_MAX
        )

    def _note_links(self) -> bool:
        """Add the decisions that the core has learnt to the entry; return whether any could be added."""
        entered, chain = self._entered, self.core.chain
        missing = self.core.head.height - entered.height - len(entered.links)
        is_full = len(entered.links) > CHANGES_MAX or sum(map(len, entered.links)) > HISTORY_BYTES_MAX
        if is_full or not 0 < missing <= len(chain):
            return False
        self._entered = replace(entered, links=(*entered.links, *chain[-missing:]))
        return True

    async def run(self) -> None:
        """Keep promises until cancelled."""
        if self.core.unsaved:
            await self._save()
        while True:
            while self._waiting:
                await self._take(self._waiting.popleft())
            now = await self._waker.wait()
            if now is not None:
                await self._take(self.core.wake, not_before=now)

    def _do(self, call: Callable[[float], list[tuple[PeerId, Any]]]) -> None:
        if len(self._waiting) < QUEUE_MAX:
            self._waiting.append(call)
            self._waker.stir()

    async def _take(
        self, call: Callable[[float], Sequence[tuple[PeerId, Any]]], *, not_before: float = 0.0
    ) -> None:
        try:
            sends = call(max(self._seams.clock.monotonic(), not_before))
        except RemoteProtocolError:
            sends = []  # a wish of our own that does not fit any more
        if self.core.unsaved:
            await self._save()
        for peer, message in sends:
            self._send(peer, message)
        events, self.core.events[:] = list(self.core.events), []
        for event in events:
            self._on_event(event)

    async def _save(self) -> None:
        self.core.unsaved = False
        await self._seams.executor.run(
            partial(self._seams.storage.write, chain_name(self._run), self.core.durable)
        )
        if self._note_links():
            data = encode(self._entered)
            await self._seams.executor.run(partial(self._seams.storage.write, history_name(self._run), data))
