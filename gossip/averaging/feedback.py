"""Error feedback: the rounding error of a lossy codec is added to the next vector."""

from gossip.averaging.codecs import Codec, roundtrip
from gossip.averaging.robust.reduction import Vector


class ErrorFeedback:
    """Adds the part of a vector that a lossy codec lost to the next vector (Karimireddy et al. 2019).

    `decay` comes from SparseLoCo: it lets old errors fade.
    """

    def __init__(self, codec: Codec, decay: float = 1.0) -> None:
        self.codec = codec
        self.decay = decay
        self.residual: Vector | None = None
        self._sent: Vector | None = None

    def add(self, vector: Vector) -> Vector:
        """Return a new vector to send, with the previous error added."""
        self._sent = vector.copy()
        if self.residual is not None:
            self._sent += self.residual * self._sent.dtype.type(self.decay)
        return self._sent

    def settle(self, *, is_included: bool) -> None:
        """End the round. If this peer's vector is in the mean, update the error; otherwise keep it."""
        if self._sent is not None and is_included:
            self.residual = self._sent - roundtrip(self.codec, self._sent)
        self._sent = None
