"""Handshakes for sessions: initiation, response, cookie. Cheap checks come first.

Both sides may begin simultaneously. In that case the initiation of the smaller peer id wins and is answered,
and the other initiation is dropped. Queued messages of both sides are still delivered.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from crypto.errors import RemoteProtocolError
from crypto.identity import Identity, PeerId
from crypto.key_conversion import agreement_private, agreement_public
from crypto.noise import Handshake
from crypto.sessions.limits import HandshakeAdmission
from crypto.sessions.macs import COOKIE_SECONDS, Cookies, Source, find_key, mac, mac_key, open_cookie
from crypto.sessions.packets import (
    COOKIE_BYTES,
    COOKIE_HEAD,
    DATAGRAM_BYTES_MAX,
    INITIATION,
    INITIATION_BYTES_MIN,
    INITIATION_HEAD,
    MAC_BYTES,
    MACS_BYTES,
    RESPONSE,
    RESPONSE_BYTES,
    RESPONSE_HEAD,
    DatagramRefused,
    InitiationOffer,
    SessionRequest,
    fits_initiation,
    read_offer,
    read_stamp,
    write_offer,
    write_stamp,
)
from crypto.sessions.session import Session
from crypto.sessions.state import ANEW_SECONDS, RETRY_SECONDS_MAX, HandshakeAttempt, PeerState
from crypto.sessions.table import SessionTable
from crypto.swarm import Swarm

_PATTERN, _CIPHER = "IKpsk2", "ChaChaPoly"
"""For such small packets, ChaCha20-Poly1305 is as fast as AES on machines of every kind."""
_KEY_BYTES = 32
_STAMPS_PER_MILLISECOND = 1_024
_PROLOGUE = b"peerloom/session/1\0"


class Handshakes:
    """The handshakes of one node. `wall_milliseconds` is the Unix time at `now`. It must be later than all
    times that the node used before its restart; until it is, other nodes refuse its initiations as
    replays."""

    def __init__(
        self,
        identity: Identity,
        swarm: Swarm,
        entropy: Callable[[int], bytes],
        table: SessionTable,
        counters: Counter[str],
        *,
        now: float,
        wall_milliseconds: int,
        admits: Callable[[PeerId], bool],
    ) -> None:
        self._peer = identity.peer
        self._admits = admits
        self._private = X25519PrivateKey.from_private_bytes(agreement_private(identity.seed))
        self._prologue = _PROLOGUE + swarm.prologue
        self._secrets = swarm.secrets
        self._mac_keys = tuple(mac_key(secret, identity.peer) for secret in swarm.secrets)
        self._entropy = entropy
        self._table = table
        self._counters = counters
        self._cookies = Cookies(entropy)
        self._admission = HandshakeAdmission(now)
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._wall_milliseconds = wall_milliseconds - now * 1000
        self._last_stamp = 0

    # --- ours --------------------------------------------------------------------------------------

    def begin(self, now: float, state: PeerState, *, carries: bool = True) -> list[bytes]:
        """Return a first or repeated initiation. If `carries`, it contains the first queued request. Return
        nothing if the amplification limit of the peer's address forbids it."""
        last = state.attempt
        if last is not None:
            self._table.attempts.pop(last.index, None)
            state.attempt = None
        if not state.may_begin(now):
            self._counters["initiations_held_unproven"] += 1
            return []
        attempt = self._make(now, state, carries=carries)
        if last is not None:
            attempt.wait_seconds = min(2 * last.wait_seconds, RETRY_SECONDS_MAX)
        attempt.retry_at = now + attempt.wait_seconds
        state.attempt = attempt
        self._table.attempts[attempt.index] = state
        self._counters["initiations_sent"] += 1
        return [attempt.packet]

    def _handshake(self, secret: bytes, remote_static: bytes | None = None) -> Handshake:
        """Begin a handshake with the owner of this key; without a key, answer a handshake that a peer
        began."""
        return Handshake(
            initiator=remote_static is not None,
            static=self._private,
            ephemeral=self._entropy(_KEY_BYTES),
            prologue=self._prologue,
            cipher=_CIPHER,
            pattern=_PATTERN,
            psk=secret,
            remote_static=remote_static,
        )

    def end(self, state: PeerState) -> None:
        """End our handshake, which is no longer needed."""
        if state.attempt is not None:
            self._table.attempts.pop(state.attempt.index, None)
            state.attempt = None

    def _make(self, now: float, state: PeerState, *, carries: bool) -> HandshakeAttempt:
        index, stamp = self._table.fresh_index(), self._next_stamp(now)
        carried = state.queue[0] if carries and state.queue and fits_initiation(state.queue[0]) else None
        if carried is not None and not carried.stamp:
            carried.stamp = stamp
        handshake = self._handshake(self._secrets[0], state.static)
        anew = state.sending(now) is None
        offer = write_offer(InitiationOffer(self._peer, stamp, anew, carried))
        body = INITIATION_HEAD.pack(INITIATION, index) + handshake.write(offer)
        body += mac(state.mac_key, body)
        mac2 = mac(state.cookie, body) if now < state.cookie_until else bytes(MAC_BYTES)
        return HandshakeAttempt(handshake, index, body + mac2, carried, now)

    def _next_stamp(self, now: float) -> int:
        clock = int((self._wall_milliseconds + now * 1000) * _STAMPS_PER_MILLISECOND)
        self._last_stamp = max(self._last_stamp + 1, clock)
        return self._last_stamp

    def on_response(self, now: float, data: bytes, source: Source) -> PeerState:
        """Complete our handshake. Return the peer that answered; its session is then confirmed."""
        if len(data) != RESPONSE_BYTES:
            raise DatagramRefused("malformed", f"a response of {len(data)} bytes")
        _, remote_index, index = RESPONSE_HEAD.unpack_from(data)
        state = self._table.attempts.get(index)
        attempt = None if state is None else state.attempt
        if state is None or attempt is None or attempt.is_broken:
            raise DatagramRefused("index", "a response to an unknown handshake")
        if find_key(self._mac_keys[:1], data[:-MAC_BYTES], data[-MAC_BYTES:]) is None:
            raise DatagramRefused("swarm", "a response of another swarm, or for another peer")
        try:
            payload = attempt.handshake.read(data[RESPONSE_HEAD.size : -MAC_BYTES])
        except RemoteProtocolError:
            # The failed handshake object is unusable; the next initiation makes a new one.
            attempt.is_broken = True
            raise DatagramRefused("seal", "a response that is not authentic") from None
        # If an initiation of the peer crossed ours and arrives late, its stamp now refuses it.
        state.memory.stamp = max(state.memory.stamp, read_stamp(payload))
        session = Session(index, remote_index, attempt.handshake.split(), now, initiated=True)
        self.end(state)
        if not self._table.settle(now, state, source):
            raise DatagramRefused("full", "no room for a session with an unknown peer")
        self._rotate(state, session)
        if attempt.carried is not None and state.queue and state.queue[0] is attempt.carried:
            self._table.take(state)
        if state.proven is None:
            state.prove(source)
        state.came_from(now, source, len(data))
        state.heard()
        self._counters["sessions_begun"] += 1
        return state

    def on_cookie(self, now: float, data: bytes) -> PeerState:
        """Queue our initiation again with the cookie of a busy peer. It goes to the peer's own address,
        because the source address of the cookie proves nothing."""
        if len(data) != COOKIE_BYTES:
            raise DatagramRefused("malformed", f"a cookie of {len(data)} bytes")
        _, index, _ = COOKIE_HEAD.unpack_from(data)
        state = self._table.attempts.get(index)
        attempt = None if state is None else state.attempt
        if state is None or attempt is None or attempt.has_cookie:
            raise DatagramRefused("index", "a cookie for an unknown handshake")
        body = attempt.packet[:-MAC_BYTES]
        cookie = open_cookie(data, state.mac_key, body[-MAC_BYTES:])
        if cookie is None:
            raise DatagramRefused("seal", "a cookie that is not authentic")
        state.cookie, state.cookie_until = cookie, now + COOKIE_SECONDS
        attempt.has_cookie = attempt.is_waiting = True
        attempt.packet = body + mac(cookie, body)
        return state

    def again(self, now: float, state: PeerState) -> list[bytes]:
        """Return the initiation that waits to be sent again."""
        attempt = state.attempt
        if attempt is None or not attempt.is_waiting:
            return []
        attempt.is_waiting = False
        self._counters["cookies_shown"] += 1
        return [attempt.packet] if state.may_send(now, len(attempt.packet)) else []

    # --- theirs ------------------------------------------------------------------------------------

    def on_initiation(
        self, now: float, data: bytes, source: Source
    ) -> tuple[PeerState | None, SessionRequest | None, list[bytes]]:
        """Return the peer that wants a session, the request in its initiation if any, and the answers. The
        peer is None if the answer is a cookie."""
        number, cookie = self._admit(now, data, source)
        if cookie is not None:
            return None, None, [cookie]
        handshake, offer = self._open(data[:-MACS_BYTES], number)
        state = self._table.peers.get(offer.peer)
        if state is None:
            state = self._table.meet_stranger(now, offer.peer, source)
        state.memory.stamp = offer.stamp
        request = offer.request
        if request is not None and request.stamp <= state.memory.request:
            request = None
        if request is not None:
            state.memory.request = request.stamp
        if state.attempt is not None and not state.attempt.is_broken and self._peer < offer.peer:
            return state, request, [state.attempt.packet]
        state.came_from(now, source, len(data))
        _, remote_index = INITIATION_HEAD.unpack_from(data)
        response = self._accept(now, state, handshake, remote_index, source, offer)
        response += mac(mac_key(self._secrets[number], offer.peer), response)
        state.allowance_bytes -= len(response)
        return state, request, [response]

    def _admit(self, now: float, data: bytes, source: Source) -> tuple[int, bytes | None]:
        """Perform all cheap checks. Return the number of the swarm secret with which the initiation was made,
        and a cookie if one is demanded."""
        if not INITIATION_BYTES_MIN <= len(data) <= DATAGRAM_BYTES_MAX:
            raise DatagramRefused("malformed", f"an initiation of {len(data)} bytes")
        mac1 = data[-MACS_BYTES:-MAC_BYTES]
        number = find_key(self._mac_keys, data[:-MACS_BYTES], mac1)
        if number is None:
            raise DatagramRefused("swarm", "an initiation of another swarm, or for another peer")
        if mac1 in self._seen:
            raise DatagramRefused("replay", "an initiation that was received before")
        if not self._admission.is_free(now):
            shown = self._cookies.is_shown(now, data[:-MAC_BYTES], data[-MAC_BYTES:], source)
            verdict = self._admission.judge(now, source, shows_cookie=shown)
            if verdict == "refuse":
                raise DatagramRefused("busy", "more handshakes than this node computes")
            if verdict == "cookie":
                self._counters["cookies_sent"] += 1
                _, index = INITIATION_HEAD.unpack_from(data)
                return number, self._cookies.answer(now, self._mac_keys[number], index, mac1, source)
        self._seen[mac1] = None
        if len(self._seen) > self._table.limits.seen_max:
            self._seen.popitem(last=False)
        return number, None

    def _open(self, covered: bytes, number: int) -> tuple[Handshake, InitiationOffer]:
        """Decrypt an initiation and check everything that it must prove."""
        handshake = self._handshake(self._secrets[number])
        try:
            offer = read_offer(handshake.read(covered[INITIATION_HEAD.size :]))
            is_right = agreement_public(offer.peer) == handshake.remote_static
        except DatagramRefused:
            raise
        except RemoteProtocolError:
            raise DatagramRefused("seal", "an initiation that is not authentic") from None
        if not is_right or offer.peer == self._peer:
            raise DatagramRefused("identity", "an initiation in another's name")
        if not self._admits(offer.peer):
            raise DatagramRefused("work", "an id without the swarm's proof of work")
        if offer.stamp <= self._table.stamp_of(offer.peer):
            raise DatagramRefused("replay", "an initiation older than a previous one")
        return handshake, offer

    def _accept(
        self,
        now: float,
        state: PeerState,
        handshake: Handshake,
        remote_index: int,
        source: Source,
        offer: InitiationOffer,
    ) -> bytes:
        """Create the requested session; return our response without its mac."""
        index = self._table.fresh_index()
        answer = handshake.write(write_stamp(self._last_stamp))
        if state.next is not None:
            self._table.sessions.pop(state.next.index, None)
        state.next = Session(index, remote_index, handshake.split(), now, initiated=False)
        state.next_source = source
        self._table.sessions[index] = (state, state.next)
        state.prefer_next_until = now + ANEW_SECONDS if offer.anew else 0.0
        if offer.anew:
            # The peer lost its old session and does not trust ours. So if this handshake fails, we must begin
            # one ourselves.
            state.doubted = True
        if state.attempt is not None:
            state.attempt.retry_at = now + state.attempt.wait_seconds
        return RESPONSE_HEAD.pack(RESPONSE, index, remote_index) + answer

    def confirm(self, now: float, state: PeerState) -> None:
        """Record that the peer has used the session that it began. Raises DatagramRefused if there is no room
        for the peer."""
        session, source = state.next, state.next_source
        assert session is not None
        assert source is not None
        if not self._table.settle(now, state, source):
            raise DatagramRefused("full", "a peer for which there is no room")
        state.next = None
        session.confirm()
        self._rotate(state, session)
        state.prove(source)
        self.end(state)
        self._counters["sessions_begun"] += 1

    def _rotate(self, state: PeerState, session: Session) -> None:
        """Make a new session the one to send on. The previous session still opens packets in flight."""
        for old in (state.previous, state.next):
            if old is not None:
                self._table.sessions.pop(old.index, None)
        state.previous, state.current, state.next = state.current, session, None
        state.prefer_next_until = 0.0
        self._table.sessions[session.index] = (state, session)
