"""A member's chain of plans, whose promises are stored before anything that depends on them is sent.

The chain (`partition.plan.paxos`) must keep its promises across restarts. So calls are made one after the
other. After a call that made promises the chain `is_storing`: the call's messages and events are held back
until the driver has stored `durable` and calls `stored`.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection
from functools import partial

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.change import Change
from partition.plan.paxos import Event, PaxosChain
from partition.plan.paxos_messages import AgreementMessage, Sends

CALLS_MAX = 4_096
"""Maximum number of calls that wait for the disk. Further calls are dropped, as a lossy network would drop
their messages."""
SENDER_CALLS_MAX = 64
"""Maximum number of waiting messages of one member, and of all unknown peers together, so that a flood does
not displace the messages of others. An agreement takes a few messages from each member."""
INF = float("inf")


class StoredChain:
    """The chain of one run at one member. After `wake` and `stored` the owner calls `take`, sends the
    messages, and handles `refused` and then the events. While the chain `is_storing`, nothing is to be sent
    or handled."""

    def __init__(self, chain: PaxosChain) -> None:
        self.core = chain
        self.is_storing = False
        self.refused: list[tuple[PeerId, str]] = []
        self._held: Sends = []
        self._calls: deque[Callable[[float], Sends]] = deque([chain.wake])  # the first promise must be stored
        self._waiting: Counter[PeerId | None] = Counter()  # by sender; None for all unknown peers
        self._is_closed = False

    @property
    def deadline(self) -> float:
        """The time of the next `wake`; already due while calls wait."""
        if self.is_storing or self._is_closed:
            return INF
        return -INF if self._calls else self.core.deadline

    def receive(self, sender: PeerId, message: AgreementMessage) -> None:
        """Queue a message about the chain from any peer; it is checked when it is taken from the queue. It is
        dropped if too many messages of the same sender, or of unknown peers, are waiting."""
        source = sender if self.core.knows(sender) else None
        has_turn = self._waiting[source] < SENDER_CALLS_MAX
        if has_turn and self._do(partial(self._receive, source, sender, message)):
            self._waiting[source] += 1

    def wish(self, change: Change | None, parent: bytes) -> None:
        """Set the change that this member proposes after the plan `parent`; None to propose nothing."""
        self._do(lambda now: self.core.wish(now, change, parent=parent))

    def reach(self, live: Collection[PeerId]) -> None:
        """Note the peers that are now believed alive."""
        self._do(lambda now: self.core.reach(now, live))

    def wake(self, now: float) -> None:
        """Make the next call. Nothing is due before `deadline`."""
        if now < self.deadline:
            return
        call = self._calls.popleft() if self._calls else self.core.wake
        try:
            self._held = list(call(now))
        except RemoteProtocolError:
            self._held = []  # this member's own proposal is outdated
        if self.core.unsaved:
            self.core.unsaved, self.is_storing = False, True

    def stored(self) -> None:
        """Note that `durable` of the chain is stored."""
        self.is_storing = False

    def take(self) -> tuple[Sends, list[Event]]:
        """Return the messages to send now, and the events to handle afterwards. Each is returned once."""
        if self.is_storing:
            return [], []
        sends, self._held = self._held, []
        events, self.core.events[:] = list(self.core.events), []
        return sends, events

    def close(self) -> None:
        """Make no more calls, because this node leaves the agreement."""
        self._is_closed = True
        self._calls.clear()
        self._waiting.clear()

    def _do(self, call: Callable[[float], Sends]) -> bool:
        has_room = not self._is_closed and len(self._calls) < CALLS_MAX
        if has_room:
            self._calls.append(call)
        return has_room

    def _receive(self, source: PeerId | None, sender: PeerId, message: AgreementMessage, now: float) -> Sends:
        self._waiting -= Counter([source])
        try:
            return list(self.core.receive(now, sender, message))
        except RemoteProtocolError as error:
            self.refused.append((sender, str(error)))
            return []
