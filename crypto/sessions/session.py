"""One pair of keys between two peers, from the end of a handshake until it is too old."""

from crypto.noise import CipherState
from crypto.sessions.packets import TRANSPORT, TRANSPORT_HEAD
from crypto.sessions.replay_window import Window

REJECT_SECONDS = 180.0
"""The age of a session on which nothing is sent or received any more (WireGuard's Reject-After-Time)."""
REKEY_SECONDS = 120.0
"""The initiator makes a new session when it sends on one of this age (WireGuard's Rekey-After-Time)."""
REKEY_RESPONDER_SECONDS = 150.0
"""The responder does so if the initiator has not: it may only be listening."""
REKEY_MESSAGES = 2**32
"""No rate reaches it in 120 s; it makes the cipher's limit independent of the clock."""
UNCONFIRMED_SECONDS = 30.0
"""A responder's session ends if the initiator does not use it in this time: an initiator does so with its
first packet."""


class Session:
    """One session. `index` is ours, `remote_index` theirs: each names the session in packets to the side that
    chose it."""

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
        """Note that the initiator has used the session, so it has our response."""
        self.expires_at = self.started_at + REJECT_SECONDS

    def is_old(self, now: float) -> bool:
        """Return whether it is time for a new one."""
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
