"""Who is in it: peers by id, sessions by index, alarms by time, each bounded. Decides nothing about packets.

A stranger is a peer that began a session and has not used it yet. Strangers push out only strangers, and
peers that have been idle; peers that we want to reach push out strangers first, then whoever was used longest
ago.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from itertools import count

from crypto.agreement import agreement_public
from crypto.identity import PeerId
from crypto.sessions.macs import mac_key
from crypto.sessions.packets import INDEX_BYTES, Request
from crypto.sessions.session import Session
from crypto.sessions.state import NEVER, Memory, PeerState

PEERS_MAX = 1_024
"""At 10 KiB each, and more while two sessions overlap; a full SWIM scope has up to 600 members, and a
routing table half as many again. Of those who list everybody, few are spoken to within a session's life."""
STRANGERS_MAX = 256
"""Sessions begun by others and not used yet: more than come in a round trip at the rate that we compute."""
PEERS_PER_PREFIX_MAX = 512
"""Peers that one IPv4 address, or 64 bits of IPv6, may have made us keep."""
RECENT_SECONDS = 60.0
"""A peer used within this time is not dropped for a stranger."""
MEMORIES_MAX = 16_384
"""Stamps remembered, the latest used: 200 bytes each; only they keep old initiations from coming twice."""
QUEUE_MAX = 128
"""Messages of one peer that wait for a session; the oldest are dropped. As many as a kernel's usual buffer
takes: what could be said in one go to a peer that is known can be said to one that is not."""
QUEUED_BYTES_MAX = 8 * 2**20
"""Of all peers together."""
_ALARMS_SPARE = 64


class Table:
    """`secret` is the swarm's first: mac1 to others is keyed with it."""

    def __init__(self, secret: bytes, entropy: Callable[[int], bytes], counters: Counter[str]) -> None:
        self.peers: OrderedDict[PeerId, PeerState] = OrderedDict()
        """The latest used last."""
        self.sessions: dict[int, tuple[PeerState, Session]] = {}
        self.attempts: dict[int, PeerState] = {}
        self._secret = secret
        self._entropy = entropy
        self._counters = counters
        self._strangers: OrderedDict[PeerId, None] = OrderedDict()
        self._by_prefix: Counter[bytes] = Counter()
        self._memories: OrderedDict[PeerId, Memory] = OrderedDict()
        self._alarms: list[tuple[float, int, PeerState]] = []
        self._numbers = count()
        self._queued_bytes = 0

    def meet(self, now: float, peer: PeerId) -> PeerState:
        """A peer that we want to reach; RemoteProtocolError if its id is worthless."""
        state = self._make(now, peer)
        if len(self.peers) >= PEERS_MAX:
            self.drop(self.peers[next(iter(self._strangers or self.peers))])
            self._counters["sessions_dropped"] += 1
        self.peers[peer] = state
        return state

    def meet_stranger(self, now: float, peer: PeerId, prefix: bytes) -> PeerState | None:
        """A peer that wants to reach us; None if there is no room for it."""
        if self._by_prefix[prefix] >= PEERS_PER_PREFIX_MAX:
            return None
        if len(self._strangers) >= STRANGERS_MAX or (len(self.peers) >= PEERS_MAX and self._strangers):
            self.drop(self.peers[next(iter(self._strangers))])
            self._counters["sessions_dropped_stranger"] += 1
        elif len(self.peers) >= PEERS_MAX:
            oldest = next(iter(self.peers.values()))
            if now - oldest.used_at < RECENT_SECONDS:
                return None
            self.drop(oldest)
            self._counters["sessions_dropped"] += 1
        state = self._make(now, peer)
        state.prefix = prefix
        self._by_prefix[prefix] += 1
        self.peers[peer] = state
        self._strangers[peer] = None
        return state

    def confirm(self, state: PeerState) -> None:
        """It has used a session, so it is a stranger no more."""
        self._strangers.pop(state.peer, None)

    def touch(self, now: float, state: PeerState) -> None:
        """It was used just now."""
        state.used_at = now
        self.peers.move_to_end(state.peer)

    def drop(self, state: PeerState) -> None:
        """Forget all of a peer but what must not come twice."""
        del self.peers[state.peer]
        self._strangers.pop(state.peer, None)
        if state.prefix is not None:
            self._by_prefix[state.prefix] -= 1
            if not self._by_prefix[state.prefix]:
                del self._by_prefix[state.prefix]
        if state.attempt is not None:
            self.attempts.pop(state.attempt.index, None)
        for session in state.sessions():
            self.sessions.pop(session.index, None)
        while state.queue:
            self.drop_oldest(state)
        # An alarm may name it for minutes yet: let no more stay than that.
        state.attempt = state.current = state.previous = state.next = None
        state.alarm_at = NEVER

    # --- what waits --------------------------------------------------------------------------------

    def put(self, state: PeerState, request: Request) -> None:
        """A message waits until there is a session."""
        state.queue.append(request)
        self._queued_bytes += request.size_bytes
        while len(state.queue) > QUEUE_MAX or (self._queued_bytes > QUEUED_BYTES_MAX and state.queue):
            self.drop_oldest(state)

    def take(self, state: PeerState) -> None:
        """The oldest waits no more."""
        self._queued_bytes -= state.queue.popleft().size_bytes

    def drop_oldest(self, state: PeerState) -> None:
        """It will not be sent."""
        self.take(state)
        self._counters["datagrams_dropped_unsent"] += 1

    def fresh_index(self) -> int:
        """A number that names no session and no handshake yet, and that nobody can guess."""
        while True:
            index = int.from_bytes(self._entropy(INDEX_BYTES), "big")
            if index not in self.sessions and index not in self.attempts:
                return index

    # --- what must not come twice ------------------------------------------------------------------

    def stamp_of(self, peer: PeerId) -> int:
        """The highest accepted of a peer's initiations; 0 if none is remembered."""
        memory = self._memories.get(peer)
        return 0 if memory is None else memory.stamp

    def _memory(self, peer: PeerId) -> Memory:
        memory = self._memories.setdefault(peer, Memory())
        self._memories.move_to_end(peer)
        while len(self._memories) > MEMORIES_MAX:
            oldest = next(iter(self._memories))
            if oldest in self.peers:
                self._memories.move_to_end(oldest)
            else:
                del self._memories[oldest]
        return memory

    def _make(self, now: float, peer: PeerId) -> PeerState:
        static = agreement_public(peer)
        return PeerState(peer, static, mac_key(self._secret, peer), self._memory(peer), now)

    # --- alarms ------------------------------------------------------------------------------------

    @property
    def deadline(self) -> float:
        """When the next alarm may be due."""
        return self._alarms[0][0] if self._alarms else NEVER

    def set_alarm(self, state: PeerState, at: float) -> None:
        """Have `due` name this peer at `at`, if not sooner."""
        if at >= state.alarm_at:
            return
        state.alarm_at = at
        heapq.heappush(self._alarms, (at, next(self._numbers), state))
        if len(self._alarms) > 4 * len(self.peers) + _ALARMS_SPARE:
            # Those that were overtaken by an earlier one.
            self._alarms = [alarm for alarm in self._alarms if alarm[0] == alarm[2].alarm_at]
            heapq.heapify(self._alarms)

    def due(self, now: float) -> Iterator[PeerState]:
        """The peers whose alarm has come; each needs a new one."""
        while self._alarms and self._alarms[0][0] <= now:
            at, _, state = heapq.heappop(self._alarms)
            if at == state.alarm_at:
                state.alarm_at = NEVER
                yield state
