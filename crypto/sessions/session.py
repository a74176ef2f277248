"""One pair of keys between two peers, from the end of a handshake until the keys are too old."""

from crypto.noise import CipherState
from crypto.sessions.packets import TRANSPORT, TRANSPORT_HEAD
from crypto.sessions.replay_window import Window

REJECT_SECONDS = 180.0
"""Age at which a session is no longer used for sending or receiving (WireGuard's Reject-After-Time)."""
REKEY_SECONDS = 120.0
"""Age at which the initiator begins a new session when it sends (WireGuard's Rekey-After-Time)."""
REKEY_RESPONDER_SECONDS = 150.0
"""Age at which the responder begins a new session if the initiator has not: the initiator may only be
listening."""
REKEY_MESSAGES = 2**32
"""Number of messages after which a new session begins. No rate reaches it in 120 s; it makes the cipher's
limit independent of the clock."""
UNCONFIRMED_SECONDS = 30.0
"""How long a responder keeps a session that the initiator has not used. An initiator uses it with its first
packet."""


class Session:
    """One session. Packets carry the index chosen by their receiver: `index` is ours, `remote_index` the
    peer's."""

    __slots__ = (
        "_receiving", "_remote_index", "_sending", "_sent", "expires_at", "index", "rekey_at", "started_at",
        "window",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        remote_index: int,
        ciphers: tuple[CipherState, CipherState],
        now: float,
        *,
        initiated: bool,
    ) -> None:
        self.index = index
        self.window = Window()
        self.started_at = now
        self.rekey_at = now + (REKEY_SECONDS if initiated else REKEY_RESPONDER_SECONDS)
        self.expires_at = now + (REJECT_SECONDS if initiated else UNCONFIRMED_SECONDS)
        self._remote_index = remote_index
        self._sending, self._receiving = ciphers
        self._sent = 0

    def confirm(self) -> None:
        """Record that the initiator has used the session, so it has our response."""
        self.expires_at = self.started_at + REJECT_SECONDS

    def is_old(self, now: float) -> bool:
        """Return whether it is time for a new session."""
        return now >= self.rekey_at or self._sent >= REKEY_MESSAGES

    def seal(self, plain: bytes) -> bytes:
        """Return a transport packet."""
        packet = TRANSPORT_HEAD.pack(TRANSPORT, self._remote_index, self._sent) + self._sending.encrypt(plain)
        self._sent += 1
        return packet

    def open(self, counter: int, sealed: bytes) -> bytes:
        """Return the plaintext of a transport packet; RemoteProtocolError if it was tampered with."""
        self._receiving.seek(counter)
        return self._receiving.decrypt(sealed)
