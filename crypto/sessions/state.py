"""The state of one peer: its sessions, our handshake in progress, the messages that wait for one, and its
address.

`table` and `core` decide when the state changes; this file only stores it.
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
"""A peer that is silent for this long after we sent may have forgotten the session, so a handshake begins. A
live peer with nothing to send answers within `REPLY_SECONDS`. WireGuard waits 15 s; here contact with a
restarted node should be restored sooner."""
REPLY_SECONDS = 1.0
"""We answer a packet with an empty one after this time, if nothing else was sent to the peer."""
ANEW_SECONDS = 3.0
"""How long we send on a session that the other side began because it had none, until that side uses the
session. The limit protects against an old initiation that an attacker held back."""
AMPLIFICATION_MAX = 3
"""Maximum bytes sent to an unproven address for each byte that came from it (as in QUIC, RFC 9000, section
8.1)."""
HOLD_SECONDS = 1.0
"""How long messages for a peer that seems to have moved wait for the answer to a challenge. After that they
go to the previously proven address."""
HOLD_AGAIN_SECONDS = 30.0
"""Minimum time between two such waits: an attacker on the path that changes addresses must not delay all
messages."""
FORGET_SECONDS = 10.0
"""How long a silent unproven address is kept."""
RETRY_SECONDS = 0.5
"""Time from an initiation to the next one, doubled each time. It is longer than most round trips."""
RETRY_SECONDS_MAX = 4.0
"""Maximum time between two initiations, so contact with a peer that comes back is restored within this
time."""


@dataclass(slots=True, eq=False)
class HandshakeAttempt:
    """A handshake that we began. `packet` is the latest packet sent; it contains the request `carried`."""

    handshake: Handshake
    index: int
    packet: bytes
    carried: SessionRequest | None
    retry_at: float
    wait_seconds: float = RETRY_SECONDS
    has_cookie: bool = False
    is_waiting: bool = False
    """Whether the initiation must be sent again, now with a cookie."""
    is_broken: bool = False


@dataclass(slots=True, eq=False)
class PeerState:
    """The state of one peer. `current` is used for sending; `previous` still opens packets in flight; `next`
    is a session that the other side began and has not used yet."""

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
    """Oldest first. A list, because the queue is short and nearly always empty, and an empty deque takes 600
    bytes."""
    cookie: bytes = b""
    cookie_until: float = 0.0
    proven: Source | None = None
    """The address from which the peer most recently answered something that only it could read. (The first
    response proves an address only because the initiation went there: an attacker that can change packets on
    the path could redirect us anywhere.)"""
    unproven: Source | None = None
    """The unproven address that the newest packet came from. It is used as the peer's address until an
    address is proven."""
    allowance_bytes: int = 0
    """Number of bytes that may still be sent to `unproven` if no address is proven. If one is proven, only
    challenges are sent to `unproven`."""
    forget_at: float = 0.0
    hold_until: float = 0.0
    hold_again_at: float = 0.0
    challenge: bytes = b""
    challenged_at: float = -NEVER
    doubted: bool = False
    """Whether the peer's silence was noticed and has not ended: messages wait for a handshake."""
    unanswered_since: float = NEVER
    reply_at: float = NEVER
    nudge_at: float = NEVER
    alarm_at: float = NEVER

    def sending(self, now: float) -> Session | None:
        """Return the session to send on; None if there is no reliable session."""
        following = self.next
        if following is not None and now < self.prefer_next_until:
            return following
        if self.doubted:
            return None
        if self.current is not None and now < self.current.expires_at:
            return self.current
        return following if following is not None and now < following.expires_at else None

    def heard(self) -> None:
        """Record that an authentic packet arrived."""
        self.unanswered_since = NEVER
        self.doubted = False

    def came_from(self, now: float, source: Source, size_bytes: int) -> None:
        """Record that the newest packet came from `source`, which may have to prove itself."""
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
        """Mark `source` as proven, because the peer that answers from it received what we sent there."""
        self.proven = source
        if self.unproven == source:
            self.unproven = None

    def is_at(self, source: Source) -> bool:
        """Return whether the peer is at `source`, as far as we know."""
        return self.proven is None or source == self.proven

    def may_begin(self, now: float) -> bool:
        """Return whether a handshake may be sent to the peer's address, given that the peer has no proven
        session."""
        if self.proven is not None or self.unproven is None:
            return True
        if now >= self.forget_at:
            self.unproven = None
            return True
        return self.may_send(now, DATAGRAM_BYTES_MAX)

    def may_send(self, now: float, size_bytes: int) -> bool:
        """Return whether `size_bytes` may be sent to the peer's address. If that address is unproven, they
        are charged to its allowance."""
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
