"""The sessions of a node: messages become packets, and packets messages. It has no socket and no clock; a
socket drives it.

    packets = sessions.send(now, peer, protocol, payload)      for wherever the peer may be
    received = sessions.receive(now, data, source)             `received.answers` go back to `source`
    for peer, packet in sessions.wake(now)                     once `deadline` has come

A message to a peer without a session is queued and a handshake begins, whose first packet already carries the
message. Nothing is delivered twice, with two exceptions below. Lost packets stay lost, except while a
handshake runs. The exceptions: a node that restarted has an empty memory, and a peer that was evicted from
the bounded memory counts as new. In these cases an initiation captured earlier can be replayed once, together
with its request. So the protocols on top must be idempotent.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.identity import Identity, PeerId
from crypto.protocols import protocol_bytes
from crypto.sessions.handshakes import Handshakes
from crypto.sessions.macs import Source
from crypto.sessions.packets import (
    ANSWER,
    CHALLENGE,
    COOKIE,
    COUNTER_MAX,
    DATAGRAM_BYTES_MAX,
    INITIATION,
    RESPONSE,
    TOKEN_BYTES,
    TRANSPORT,
    TRANSPORT_BYTES_MIN,
    TRANSPORT_HEAD,
    Datagram,
    DatagramRefused,
    SessionRequest,
    read_control,
    read_message,
    write_control,
    write_message,
)
from crypto.sessions.session import Session
from crypto.sessions.state import NEVER, REPLY_SECONDS, RETRY_SECONDS, SILENCE_SECONDS, PeerState
from crypto.sessions.table import SessionLimits, SessionTable
from crypto.swarm import Swarm

WAKEN_MAX = 16
"""Maximum number of peers served in one wake. Each may need a handshake, which takes 0.5 to 1 ms, and a peer
that names hundreds of nonexistent peers makes us begin, and repeat, a handshake with each."""

WAIT_SECONDS = 20.0
"""Maximum time that anything waits for an answer to a datagram."""
CHALLENGE_SECONDS = 0.5
"""Minimum time between two challenges to one address."""

_HEAD_BYTES = TRANSPORT_HEAD.size


@dataclass(slots=True)
class Received:
    """The result of receiving a packet. `peer` is None if the packet authenticates no peer (a cookie was
    demanded or received). `newest`: no packet sent later by this peer has been received before this one, so
    its source is the peer's current address."""

    peer: PeerId | None
    newest: bool = False
    datagram: Datagram | None = None
    answers: list[bytes] = field(default_factory=list)


class Sessions:
    """All sessions of one node. `now` is monotonic seconds and never decreases; `wall_milliseconds` is the
    Unix time at the start; `entropy(n)` returns n unpredictable bytes. Peers whose id `admits` rejects get no
    session."""

    def __init__(
        self,
        identity: Identity,
        swarm: Swarm,
        entropy: Callable[[int], bytes],
        *,
        now: float,
        wall_milliseconds: int,
        counters: Counter[str] | None = None,
        admits: Callable[[PeerId], bool] = lambda _peer: True,
        limits: SessionLimits | None = None,
    ) -> None:
        self._peer = identity.peer
        self._entropy = entropy
        self._counters = Counter[str]() if counters is None else counters
        self.unanswered: list[PeerId] = []
        """Peers of the latest `wake` that have left two or more initiations unanswered."""
        self._table = SessionTable(swarm.secrets[0], entropy, self._counters, limits or SessionLimits())
        self._handshakes = Handshakes(
            identity,
            swarm,
            entropy,
            self._table,
            self._counters,
            now=now,
            wall_milliseconds=wall_milliseconds,
            admits=admits,
        )

    @property
    def deadline(self) -> float:
        """When to call `wake`, in monotonic seconds; infinity if never."""
        return self._table.deadline

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """The peers with a usable session or a handshake in progress, the most recently used last."""
        return tuple(self._table.peers)

    # --- out ---------------------------------------------------------------------------------------

    def send(self, now: float, peer: PeerId, protocol: str, payload: bytes) -> list[bytes]:
        """Return packets for the peer. Return none while the message waits for a handshake that is already
        running.

        Raises LocalProtocolError if the payload is longer than `payload_bytes_max(protocol)`, or if the peer
        is this node.
        """
        name = protocol_bytes(protocol)
        size_bytes = TRANSPORT_BYTES_MIN + 1 + len(name) + len(payload)
        if size_bytes > DATAGRAM_BYTES_MAX or peer == self._peer:
            raise LocalProtocolError(
                f"{len(payload)} bytes of {protocol} do not fit into a datagram, or are "
                "addressed to this node itself"
            )
        state = self._table.peers.get(peer)
        if state is None:
            try:
                state = self._table.meet(now, peer)
            except RemoteProtocolError:
                self._counters["datagrams_dropped_no_key"] += 1
                return []
        self._table.touch(now, state)
        if not state.queue:
            session = state.sending(now)
            if session is not None and state.may_send(now, size_bytes):
                packet = session.seal(bytes((len(name),)) + name + payload)
                self._sent(now, state)
                if session.is_old(now) and state.attempt is None:
                    return [packet, *self._begin(now, state)]
                return [packet]
        return self._queue(now, state, SessionRequest(name, payload, now + WAIT_SECONDS))

    def knock(self, now: float, peer: PeerId, *, anew: bool = False) -> list[bytes]:
        """Return packets that try a handshake with a peer; none while a handshake runs, unless `anew`. Each
        packet has INITIATION_BYTES_MIN bytes and carries no message: queued messages are sent once there is a
        session."""
        state = self._table.peers.get(peer)
        if state is None:
            try:
                state = self._table.meet(now, peer)
            except RemoteProtocolError:
                return []
        self._table.touch(now, state)
        return self._begin(now, state, carries=False) if anew or state.attempt is None else []

    def doubt(self) -> None:
        """Distrust all sessions, so that the next message to each peer begins a handshake. For use when a
        second process with our identity may have replaced our sessions with its own."""
        for state in self._table.peers.values():
            state.doubted = True

    def _queue(self, now: float, state: PeerState, request: SessionRequest) -> list[bytes]:
        self._table.put(state, request)
        packets = self._flush(now, state)
        if state.queue and state.attempt is None and state.sending(now) is None:
            packets += self._begin(now, state)
        if state.queue and state.attempt is None and state.nudge_at == NEVER:
            state.nudge_at = now + RETRY_SECONDS
        self._table.set_alarm(state, state.due_at())
        return packets

    def _flush(self, now: float, state: PeerState) -> list[bytes]:
        """Return the waiting packets that can be sent."""
        packets: list[bytes] = []
        session = state.sending(now)
        while state.queue and session is not None:
            plain = write_message(state.queue[0])
            if not state.may_send(now, TRANSPORT_BYTES_MIN + len(plain)):
                break
            self._table.take(state)
            packets.append(session.seal(plain))
        if packets:
            self._sent(now, state)
        return packets

    def _begin(self, now: float, state: PeerState, *, carries: bool = True) -> list[bytes]:
        packets = self._handshakes.begin(now, state, carries=carries)
        self._table.set_alarm(state, state.due_at())
        return packets

    def _sent(self, now: float, state: PeerState) -> None:
        """Record that a message has left for the peer, which must answer if it is alive."""
        state.reply_at = NEVER
        if state.unanswered_since == NEVER:
            state.unanswered_since = now
            self._table.set_alarm(state, now + SILENCE_SECONDS)

    # --- in ----------------------------------------------------------------------------------------

    def receive(self, now: float, data: bytes, source: Source) -> Received:
        """Process a packet from `source`. Raises DatagramRefused, with a reason for a counter, if the packet
        is not authentic or is a repeat."""
        kind = data[0] if data else 0
        if kind == TRANSPORT:
            return self._transport(now, data, source)
        if kind == INITIATION:
            return self._initiation(now, data, source)
        if kind == RESPONSE:
            state = self._handshakes.on_response(now, data, source)
            self._table.touch(now, state)
            assert state.current is not None
            # Send one of the three possible answers: any of them tells the other side that we have the
            # session.
            answers = (
                self._challenge(now, state, state.current)
                or self._flush(now, state)
                or self._keepalive(now, state)
            )
            self._table.set_alarm(state, state.due_at())
            return Received(state.peer, state.is_at(source), answers=answers)
        if kind == COOKIE:
            state = self._handshakes.on_cookie(now, data)
            self._table.set_alarm(state, now)
            return Received(None)
        raise DatagramRefused("malformed", "a packet of unknown type")

    def _initiation(self, now: float, data: bytes, source: Source) -> Received:
        state, request, answers = self._handshakes.on_initiation(now, data, source)
        if state is None:
            return Received(None, answers=answers)
        state.unanswered_since = NEVER
        datagram = None
        if request is not None:
            state.reply_at = min(state.reply_at, now + REPLY_SECONDS)
            datagram = Datagram(state.peer, request.name.decode(), request.payload, newest=True)
        # If our own initiation won instead, it already asks for the peer at the address where we believe the
        # peer is.
        is_there = state.next is not None and state.next_source == source and state.is_at(source)
        if is_there:
            answers += self._flush(now, state)
        self._table.set_alarm(state, state.due_at())
        return Received(state.peer, is_there, datagram=datagram, answers=answers)

    def _transport(self, now: float, data: bytes, source: Source) -> Received:
        if not TRANSPORT_BYTES_MIN <= len(data) <= DATAGRAM_BYTES_MAX:
            raise DatagramRefused("malformed", f"a packet of {len(data)} bytes")
        _, index, counter = TRANSPORT_HEAD.unpack_from(data)
        found = self._table.sessions.get(index)
        if found is None:
            raise DatagramRefused("index", "a packet of an unknown session")
        state, session = found
        if counter >= COUNTER_MAX or not session.window.is_new(counter):
            raise DatagramRefused("replay", "a packet that was received before, or is too old to tell")
        if now >= session.expires_at:
            raise DatagramRefused("expired", "a packet of a session that is too old")
        try:
            plain = session.open(counter, data[_HEAD_BYTES:])
        except RemoteProtocolError:
            raise DatagramRefused("seal", "a packet that is not authentic") from None
        return self._opened(now, state, session, plain, source, len(data), session.window.mark(counter))

    def _opened(
        self,
        now: float,
        state: PeerState,
        session: Session,
        plain: bytes,
        source: Source,
        size_bytes: int,
        is_newest: bool,
    ) -> Received:
        """Process an authentic packet of a session, received for the first time."""
        confirms = session is state.next
        if confirms:
            self._handshakes.confirm(now, state)
        state.heard()
        self._table.touch(now, state)
        is_newest = is_newest and session is state.current
        received = Received(state.peer)
        if is_newest and (source != state.proven or state.unproven is not None):
            state.came_from(now, source, size_bytes)
            received.answers = self._challenge(now, state, session)
        if plain:
            if plain[0]:
                received.datagram = self._message(now, state, plain, is_newest)
            else:
                self._control(state, session, plain, source, received)
        received.newest = is_newest and source == state.proven
        if state.queue and received.newest:
            received.answers += self._flush(now, state)
        if confirms:
            self._table.set_alarm(state, state.due_at())
        return received

    def _message(self, now: float, state: PeerState, plain: bytes, is_newest: bool) -> Datagram | None:
        stamp, protocol, payload = read_message(plain)
        if state.reply_at == NEVER:
            state.reply_at = now + REPLY_SECONDS
            self._table.set_alarm(state, state.reply_at)
        if stamp:
            if stamp <= state.memory.request:
                # An initiation has already delivered this message, which its sender could not know.
                self._counters["datagrams_repeated"] += 1
                return None
            state.memory.request = stamp
        return Datagram(state.peer, protocol, payload, is_newest)

    # --- addresses that have to prove themselves ---------------------------------------------------

    def _challenge(self, now: float, state: PeerState, session: Session) -> list[bytes]:
        """Ask the unproven address for a token that only the peer can read."""
        if state.unproven is None or now - state.challenged_at < CHALLENGE_SECONDS:
            return []
        state.challenge, state.challenged_at = self._entropy(TOKEN_BYTES), now
        self._counters["addresses_challenged"] += 1
        return [session.seal(write_control(CHALLENGE, state.challenge))]

    def _control(
        self, state: PeerState, session: Session, plain: bytes, source: Source, received: Received
    ) -> None:
        kind, token = read_control(plain)
        if kind == CHALLENGE:
            # The answer is no longer than the challenge, so it may go to any address.
            received.answers.append(session.seal(write_control(ANSWER, token)))
        elif token == state.challenge and source == state.unproven:
            state.prove(source)

    # --- time --------------------------------------------------------------------------------------

    def wake(self, now: float) -> list[tuple[PeerId, bytes]]:
        """Return the packets that are due, with their peers: repeated handshakes and keepalives. A call
        serves at most WAKEN_MAX peers; while more are due, `deadline` is in the past."""
        packets: list[tuple[PeerId, bytes]] = []
        self.unanswered.clear()
        for state in islice(self._table.due(now), WAKEN_MAX):
            packets += [(state.peer, packet) for packet in self._tick(now, state)]
            if state.attempt is None and not state.queue and not state.sessions():
                self._table.drop(state)
            else:
                self._table.set_alarm(state, state.due_at())
        return packets

    def _tick(self, now: float, state: PeerState) -> list[bytes]:
        packets: list[bytes] = []
        if state.reply_at <= now:
            packets += self._keepalive(now, state)
        for session in state.sessions():
            if session.expires_at <= now:
                self._expire(state, session)
        while state.queue and state.queue[0].expires_at <= now:
            self._table.drop_oldest(state)
        if state.unanswered_since + SILENCE_SECONDS <= now:
            state.unanswered_since, state.doubted = NEVER, True
            self._counters["silences_noticed"] += 1
            if state.attempt is None:
                packets += self._handshakes.begin(now, state)
        packets += self._handshakes.again(now, state) + self._retry(now, state)
        if state.nudge_at <= now:
            state.nudge_at = NEVER
            packets += self._flush(now, state)
            if state.queue and state.attempt is None:
                packets += self._handshakes.begin(now, state)
        if state.queue and state.attempt is None:
            state.nudge_at = now + RETRY_SECONDS
        return packets

    def _retry(self, now: float, state: PeerState) -> list[bytes]:
        """Send another initiation if anything waits for it, because the previous one was not answered in
        time."""
        attempt = state.attempt
        if attempt is None or attempt.retry_at > now:
            return []
        if attempt.wait_seconds > RETRY_SECONDS:
            self.unanswered.append(state.peer)
        if state.queue:
            return self._handshakes.begin(now, state)
        self._handshakes.end(state)
        self._counters["initiations_unanswered"] += 1
        return []

    def _expire(self, state: PeerState, session: Session) -> None:
        self._table.sessions.pop(session.index, None)
        if session is state.current:
            state.current = None
        elif session is state.previous:
            state.previous = None
        else:
            state.next = None

    def _keepalive(self, now: float, state: PeerState) -> list[bytes]:
        """Send an empty packet, which shows that we are alive and have the session."""
        state.reply_at = NEVER
        session = state.sending(now)
        if session is None or not state.may_send(now, TRANSPORT_BYTES_MIN):
            return []
        return [session.seal(b"")]
