"""Session table: peers by id, sessions by index, alarms by time, each bounded. It decides nothing about
packets.

A peer is in one of three pools. *Strangers* began a session and have not used it: their address may be
forged, so they evict only one another. *Wanted* peers are those that we want to reach but have no session
with. *Settled* peers have used a session, so their address is real. A new settled peer evicts a peer of the
largest source, if that source is larger than its own (`crowds`), else an idle peer.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from crypto.crowds import Crowd
from crypto.identity import PeerId
from crypto.key_conversion import agreement_public
from crypto.sessions.macs import Source, mac_key
from crypto.sessions.memories import Memories
from crypto.sessions.packets import DATAGRAM_BYTES_MAX, INDEX_BYTES, SessionRequest
from crypto.sessions.session import Session
from crypto.sessions.state import NEVER, PeerState
from crypto.token_buckets import prefix_of

PEERS_MAX = 1_024
"""Maximum number of wanted and settled peers. Each takes 10 KiB, and more while two sessions overlap. A full
SWIM scope has up to 600 members, and a routing table half as many again. A peer that lists everybody
communicates with only a few of them within a session's lifetime."""
WANTED_MAX = 256
"""Maximum number of wanted peers, which may evict settled ones: other peers can name us peers that do not
exist."""
STRANGERS_MAX = 256
"""Maximum number of sessions that others began and have not used yet: more than arrive in a round trip at the
maximum handshake rate."""
RECENT_SECONDS = 60.0
"""A peer used within this time is not evicted for a peer of an equally large source."""
QUEUE_MAX = 128
"""Maximum number of messages of one peer that wait for a session; the oldest are dropped. It equals what a
kernel's usual buffer holds, so a burst reaches an unknown peer as well as it reaches a known one."""
STRANGER_QUEUE_MAX = 16
"""Maximum number of waiting messages of a stranger. All strangers together fill at most two thirds of
QUEUED_BYTES_MAX, which leaves room for messages to others."""
QUEUED_BYTES_MAX = 8 * 2**20
"""Maximum bytes of waiting messages of all peers together."""
MEMORIES_MAX = 16_384
"""Number of peers whose replay memory is kept, at 500 bytes each. Only this memory prevents the replay of old
initiations."""
SEEN_MAX = 4_096
"""Number of initiations remembered, so that a copy of one is refused without computing. An initiation may
arrive over several paths."""
_ALARMS_SPARE = 64
_NOWHERE = b""
"""The source assigned to a peer that we want to reach; its real source is known when it answers."""


@dataclass(frozen=True)
class SessionLimits:
    """The limits of one node's sessions. Raises ValueError if they contradict each other."""

    peers_max: int = PEERS_MAX
    """At least `wanted_max`."""

    wanted_max: int = WANTED_MAX
    """At most `peers_max`, so that wanted peers leave room for settled peers."""

    strangers_max: int = STRANGERS_MAX
    """Low enough that the strangers' queues fill at most two thirds of `queued_bytes_max`."""

    queued_bytes_max: int = QUEUED_BYTES_MAX
    """See `strangers_max`."""

    memories_max: int = MEMORIES_MAX
    """Greater than `peers_max`, because a memory outlives the peer's sessions."""

    seen_max: int = SEEN_MAX
    """At least 1."""

    def __post_init__(self) -> None:
        queues_bytes = self.strangers_max * STRANGER_QUEUE_MAX * DATAGRAM_BYTES_MAX
        bounds = (
            (1 <= self.wanted_max <= self.peers_max, "wanted_max must be at most peers_max"),
            (self.strangers_max >= 1, "strangers at least 1"),
            (
                3 * queues_bytes <= 2 * self.queued_bytes_max,
                ("the queues of strangers may fill at most two thirds of queued_bytes_max"),
            ),
            (self.memories_max > self.peers_max, "memories above peers"),
            (self.seen_max >= 1, "seen at least 1"),
        )
        for holds, rule in bounds:
            if not holds:
                raise ValueError(f"session limits: {rule}")


class SessionTable:
    """All peers of a node. `secret` is the first of the swarm's secrets; mac1 on packets to others is keyed
    with it."""

    def __init__(
        self,
        secret: bytes,
        entropy: Callable[[int], bytes],
        counters: Counter[str],
        limits: SessionLimits,
    ) -> None:
        self.peers: OrderedDict[PeerId, PeerState] = OrderedDict()
        """The most recently used last."""
        self.sessions: dict[int, tuple[PeerState, Session]] = {}
        self.attempts: dict[int, PeerState] = {}
        self._secret = secret
        self._entropy = entropy
        self._counters = counters
        self.limits = limits
        self._strangers: Crowd[PeerId] = Crowd()
        self._wanted: OrderedDict[PeerId, None] = OrderedDict()
        self._settled: Crowd[PeerId] = Crowd()
        self._memories = Memories(self.peers.__contains__, limits.memories_max)
        self._alarms: list[tuple[float, PeerId]] = []
        # Alarms hold peer ids, not states, so that a dropped peer's state does not stay in memory until its
        # alarm.
        self._queued_bytes = 0

    def meet(self, now: float, peer: PeerId) -> PeerState:
        """Return the state of a peer that we want to reach. Raises RemoteProtocolError if its id is a key of
        small order."""
        state = self._make(now, peer)
        if len(self._wanted) + len(self._settled) >= self.limits.peers_max:
            if len(self._wanted) >= self.limits.wanted_max or not len(self._settled):
                self.drop(self.peers[next(iter(self._wanted))])
            else:
                self.drop(self._least_recent(_NOWHERE))
            self._counters["sessions_dropped"] += 1
        self.peers[peer] = state
        self._wanted[peer] = None
        return state

    def meet_stranger(self, now: float, peer: PeerId, source: Source) -> PeerState:
        """Return the state of a peer that wants to reach us, apparently from `source`."""
        prefix = prefix_of(source[0])
        state = self._make(now, peer)
        if len(self._strangers) >= self.limits.strangers_max:
            # Evict the oldest: an honest stranger completes its handshake before it becomes the oldest.
            members = self._strangers.greedier(prefix) or self._strangers.equals(prefix)
            self.drop(self.peers[next(iter(members))])
            self._counters["sessions_dropped_stranger"] += 1
        self.peers[peer] = state
        self._strangers.add(peer, prefix)
        return state

    def settle(self, now: float, state: PeerState, source: Source) -> bool:
        """Settle a peer that has used a session from `source`. Return False if there is no room for it; the
        peer is then dropped."""
        prefix = prefix_of(source[0])
        if state.peer in self._settled:
            return True
        if state.peer in self._strangers and len(self._wanted) + len(self._settled) >= self.limits.peers_max:
            is_greedier = bool(self._settled.greedier(prefix))
            oldest = self._least_recent(prefix) if len(self._settled) else None
            if oldest is None or not (is_greedier or now - oldest.used_at >= RECENT_SECONDS):
                self.drop(state)
                return False
            self.drop(oldest)
            self._counters["sessions_dropped"] += 1
        self._strangers.remove(state.peer)
        self._wanted.pop(state.peer, None)
        self._settled.add(state.peer, prefix)
        self._memories.prove(state.peer, prefix)
        return True

    def _least_recent(self, prefix: bytes) -> PeerState:
        """Return the least recently used of the settled peers from which one must make room for a peer of
        this source."""
        members = self._settled.greedier(prefix) or self._settled.equals(prefix)
        return min((self.peers[peer] for peer in members), key=_used_at)

    def touch(self, now: float, state: PeerState) -> None:
        """Mark a peer as just used."""
        state.used_at = now
        self.peers.move_to_end(state.peer)

    def drop(self, state: PeerState) -> None:
        """Remove a peer's state, except for its replay memory."""
        del self.peers[state.peer]
        self._strangers.remove(state.peer)
        self._wanted.pop(state.peer, None)
        self._settled.remove(state.peer)
        self._memories.close(state.peer)
        if state.attempt is not None:
            self.attempts.pop(state.attempt.index, None)
        for session in state.sessions():
            self.sessions.pop(session.index, None)
        while state.queue:
            self.drop_oldest(state)
        # Code that still holds the state must find no session to send with.
        state.attempt = state.current = state.previous = state.next = None

    # --- queued messages --------------------------------------------------------------------------------

    def put(self, state: PeerState, request: SessionRequest) -> None:
        """Queue a message until there is a session."""
        state.queue.append(request)
        self._queued_bytes += request.size_bytes
        messages_max = STRANGER_QUEUE_MAX if state.peer in self._strangers else QUEUE_MAX
        bytes_max = self.limits.queued_bytes_max
        while len(state.queue) > messages_max or (self._queued_bytes > bytes_max and state.queue):
            self.drop_oldest(state)

    def take(self, state: PeerState) -> None:
        """Remove the oldest message from the queue."""
        self._queued_bytes -= state.queue.pop(0).size_bytes

    def drop_oldest(self, state: PeerState) -> None:
        """Discard the oldest message without sending it."""
        self.take(state)
        self._counters["datagrams_dropped_unsent"] += 1

    def fresh_index(self) -> int:
        """Return an unpredictable number that no session and no handshake uses yet."""
        while True:
            index = int.from_bytes(self._entropy(INDEX_BYTES), "big")
            if index not in self.sessions and index not in self.attempts:
                return index

    def stamp_of(self, peer: PeerId) -> int:
        """Return the highest accepted stamp of a peer's initiations; 0 if none is remembered."""
        return self._memories.stamp_of(peer)

    def _make(self, now: float, peer: PeerId) -> PeerState:
        static = agreement_public(peer)
        return PeerState(peer, static, mac_key(self._secret, peer), self._memories.open(peer), now)

    # --- alarms ------------------------------------------------------------------------------------

    @property
    def deadline(self) -> float:
        """The earliest time at which an alarm may be due."""
        return self._alarms[0][0] if self._alarms else NEVER

    def set_alarm(self, state: PeerState, at: float) -> None:
        """Make `due` yield this peer at `at`, or at its earlier alarm."""
        if at >= state.alarm_at:
            return
        state.alarm_at = at
        heapq.heappush(self._alarms, (at, state.peer))
        if len(self._alarms) > 4 * len(self.peers) + _ALARMS_SPARE:
            # Remove alarms that an earlier alarm of the same peer has replaced.
            self._alarms = [alarm for alarm in self._alarms if self._named(alarm) is not None]
            heapq.heapify(self._alarms)

    def due(self, now: float) -> Iterator[PeerState]:
        """Yield the peers whose alarm is due; the caller must set a new alarm for each."""
        while self._alarms and self._alarms[0][0] <= now:
            state = self._named(heapq.heappop(self._alarms))
            if state is not None:
                state.alarm_at = NEVER
                yield state

    def _named(self, alarm: tuple[float, PeerId]) -> PeerState | None:
        """Return the peer of an alarm; None if an earlier alarm replaced it, or if the peer was dropped."""
        state = self.peers.get(alarm[1])
        return state if state is not None and alarm[0] == state.alarm_at else None


def _used_at(state: PeerState) -> float:
    return state.used_at
