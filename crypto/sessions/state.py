"""The state of one peer: its sessions, our handshake under way, the messages that wait for one, and its
address.

`table` and `core` decide when it changes; this file only keeps it.
"""

from dataclasses import dataclass, field

from crypto.identity import PeerId
from crypto.noise import Handshake
from crypto.sessions.macs import Source
from crypto.sessions.memories import PeerMemory
from crypto.sessions.packets import DATAGRAM_BYTES_MAX, SessionRequest
from crypto.sessions.session import Session

NEVER = float("inf")
SILENCE_SECONDS = 4.0
"""A peer silent for this long after we sent may have forgotten the session, so a handshake begins. A peer
with nothing to say answers within `REPLY_SECONDS`. WireGuard waits 15 s; a node that restarts should be met
again sooner."""
REPLY_SECONDS = 1.0
"""After this we answer a packet with an empty one, if nothing else went that way."""
ANEW_SECONDS = 3.0
"""How long we send on a session that the other side began without having one, until that side uses it. The
limit guards against an old initiation that an attacker held back."""
AMPLIFICATION_MAX = 3
"""Bytes sent to an unproven address for each that came from it (as QUIC, RFC 9000, section 8.1)."""
HOLD_SECONDS = 1.0
"""A peer that seems to have moved is challenged, and messages for it wait this long for the answer. Then they
go to the address that was proven before."""
HOLD_AGAIN_SECONDS = 30.0
"""The least time between two such waits: an attacker on the way that changes addresses must not delay
everything."""
FORGET_SECONDS = 10.0
"""How long a silent unproven address is kept."""
RETRY_SECONDS = 0.5
"""From an initiation to the next one; doubled each time. Longer than most round trips."""
RETRY_SECONDS_MAX = 4.0
"""The longest pause: a peer that comes back is met again this soon."""


@dataclass(slots=True, eq=False)
class HandshakeAttempt:
    """A handshake that we began. `packet` is as it was sent last; `carried` rides in it."""

    handshake: Handshake
    index: int
    packet: bytes
    carried: SessionRequest | None
    retry_at: float
    wait_seconds: float = RETRY_SECONDS
    has_cookie: bool = False
    is_waiting: bool = False
    """It is to go out again, now with a cookie."""
    is_broken: bool = False


@dataclass(slots=True, eq=False)
class PeerState:
    """The state of one peer. `current` is used for sending; `previous` still opens packets under way; `next`
    is one that the other side began and has not used yet."""

    peer: PeerId
    static: bytes
    mac_key: bytes
    memory: PeerMemory
    used_at: float
    current: Session | None = None
    previous: Session | None = None
    next: Session | None = None
    next_source: Source | None = None
    prefer_next_until: float = 0.0
    attempt: HandshakeAttempt | None = None
    queue: list[SessionRequest] = field(default_factory=list)
    """Oldest first. Short, and empty with nearly all peers: an empty deque would hold 600 bytes."""
    cookie: bytes = b""
    cookie_until: float = 0.0
    proven: Source | None = None
    """The address where something only the peer could read was answered last. (The first response proves one
    because an initiation went there; an attacker that can change packets on that way could send us
    anywhere.)"""
    unproven: Source | None = None
    """The unproven address that the newest packet came from. As long as no other is proven, the peer is
    here."""
    allowance_bytes: int = 0
    """The bytes that may still go to `unproven` if no address is proven; if one is, only challenges go
    there."""
    forget_at: float = 0.0
    hold_until: float = 0.0
    hold_again_at: float = 0.0
    challenge: bytes = b""
    challenged_at: float = -NEVER
    doubted: bool = False
    """The peer is still silent since its silence was noticed: messages wait for a handshake."""
    unanswered_since: float = NEVER
    reply_at: float = NEVER
    nudge_at: float = NEVER
    alarm_at: float = NEVER

    def sending(self, now: float) -> Session | None:
        """Return the session to send on, None if there is no reliable one."""
        following = self.next
        if following is not None and now < self.prefer_next_until:
            return following
        if self.doubted:
            return None
        if self.current is not None and now < self.current.expires_at:
            return self.current
        return following if following is not None and now < following.expires_at else None

    def heard(self) -> None:
        """Note that an authentic packet came."""
        self.unanswered_since = NEVER
        self.doubted = False

    def came_from(self, now: float, source: Source, size_bytes: int) -> None:
        """Note that the newest packet is from `source`, which may have to prove itself."""
        if source == self.proven:
            self.unproven = None
            return
        if source != self.unproven:
            self.unproven, self.allowance_bytes, self.challenged_at = source, 0, -NEVER
            if self.proven is not None and now >= self.hold_again_at:
                self.hold_until, self.hold_again_at = now + HOLD_SECONDS, now + HOLD_AGAIN_SECONDS
        self.allowance_bytes += AMPLIFICATION_MAX * size_bytes
        self.forget_at = now + FORGET_SECONDS

    def prove(self, source: Source) -> None:
        """Mark `source` as proven: the peer that answers from it received what we sent there."""
        self.proven = source
        if self.unproven == source:
            self.unproven = None

    def is_at(self, source: Source) -> bool:
        """Return whether the peer is at `source`, as far as we know."""
        return self.proven is None or source == self.proven

    def may_begin(self, now: float) -> bool:
        """Return whether a handshake may go to the peer's address; it has no proved session then."""
        if self.proven is not None or self.unproven is None:
            return True
        if now >= self.forget_at:
            self.unproven = None
            return True
        return self.may_send(now, DATAGRAM_BYTES_MAX)

    def may_send(self, now: float, size_bytes: int) -> bool:
        """Return whether so many bytes may go to the peer's address; they are charged if that is unproven."""
        if self.unproven is None:
            return True
        if self.proven is not None:
            return now >= self.hold_until
        if size_bytes > self.allowance_bytes:
            return False
        self.allowance_bytes -= size_bytes
        return True

    def sessions(self) -> tuple[Session, ...]:
        """The existing sessions."""
        return tuple(session for session in (self.current, self.previous, self.next) if session is not None)

    def due_at(self) -> float:
        """Return when the next action is due."""
        attempt = self.attempt
        times = [
            self.reply_at,
            self.nudge_at,
            self.unanswered_since + SILENCE_SECONDS,
            NEVER if attempt is None else 0.0 if attempt.is_waiting else attempt.retry_at,
            *(session.expires_at for session in self.sessions()),
        ]
        if self.queue:
            times.append(self.queue[0].expires_at)
        return min(times)
