"""Error feedback: the rounding error of a lossy codec is added to the next vector."""

from gossip.averaging.codecs import Codec, roundtrip
from gossip.averaging.robust.reduction import Vector


class ErrorFeedback:
    """Adds what a lossy codec lost of a vector to the next one (Karimireddy et al. 2019).

    `decay` is SparseLoCo's: old errors fade.
    """

    def __init__(self, codec: Codec, decay: float = 1.0) -> None:
        self.codec = codec
        self.decay = decay
        self.residual: Vector | None = None
        self._sent: Vector | None = None

    def add(self, vector: Vector) -> Vector:
        """Return a new vector to send, with the old error added."""
        self._sent = vector.copy()
        if self.residual is not None:
            self._sent += self.residual * self._sent.dtype.type(self.decay)
        return self._sent

    def settle(self, *, is_included: bool) -> None:
        """End the round: if this peer's vector is in the mean its error is updated, otherwise it stays."""
        if self._sent is not None and is_included:
            self.residual = self._sent - roundtrip(self.codec, self._sent)
        self._sent = None
