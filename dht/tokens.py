"""Write tokens: proof that a peer that stores has asked this node itself within the last minutes (BEP 5).

A token is a keyed hash of the asker and of a period of time, so nothing is kept for peers that never store.
It is no permission: `records` and its quotas decide what is kept. A token makes each store cost its sender an
answered question, and makes a captured Store worthless after ten minutes.
"""

import hashlib

from crypto.identity import PeerId
from dht.messages import TOKEN_BYTES

PERIOD_SECONDS = 300.0
"""A token holds in the period it was made in and in the next: at least five minutes, at most ten."""
TOKEN_SECONDS = 240.0
"""A token of another node is used for this long after its answer: less than its validity, to allow for the
way there."""

SECRET_BYTES = 32


class WriteTokens:
    """Makes and checks the tokens of one node. `secret` comes from its shell's entropy."""

    # Not a dataclass: a node's recording (`node.recording`) contains the fields of dataclasses.
    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def make(self, now: float, peer: PeerId) -> bytes:
        """Return the token of `peer` at the monotonic time `now`."""
        return self._of(int(now // PERIOD_SECONDS), peer)

    def holds(self, now: float, peer: PeerId, token: bytes) -> bool:
        """Return whether `token` was given to `peer` lately."""
        period = int(now // PERIOD_SECONDS)
        return token in (self._of(period, peer), self._of(period - 1, peer))

    def _of(self, period: int, peer: PeerId) -> bytes:
        data = period.to_bytes(8, "big", signed=True) + peer
        return hashlib.blake2b(data, digest_size=TOKEN_BYTES, key=self._secret).digest()
