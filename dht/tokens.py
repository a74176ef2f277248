"""Write tokens: proof that a storing peer has sent this node a request within the last minutes (BEP 5).

A token is a keyed hash of the asking peer and a period of time, so nothing is kept for peers that never
store. It is not a permission: `records` and its quotas decide what is kept. Because of it, each store costs
its sender a request that was answered, and a captured Store is worthless after ten minutes.
"""

import hashlib

from crypto.identity import PeerId
from dht.messages import TOKEN_BYTES

PERIOD_SECONDS = 300.0
"""Length of a period. A token is valid in the period in which it was made and in the next one: at least five
minutes, at most ten."""
TOKEN_SECONDS = 240.0
"""How long another node's token is used after its answer: less than its validity, to allow for the travel
time."""

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
        """Return whether `token` was recently given to `peer`."""
        period = int(now // PERIOD_SECONDS)
        return token in (self._of(period, peer), self._of(period - 1, peer))

    def _of(self, period: int, peer: PeerId) -> bytes:
        data = period.to_bytes(8, "big", signed=True) + peer
        return hashlib.blake2b(data, digest_size=TOKEN_BYTES, key=self._secret).digest()
