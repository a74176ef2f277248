"""Rounding errors of int4, kept by the sender and added to its next tensor in the same position.

Error feedback (Seide et al. 2014, "1-bit stochastic gradient descent"; Karimireddy et al. 2019): the next
gradient makes up for the loss of the previous one, so over many micro-batches nothing is lost in total. It
affects only encoding: a frame that is sent again has the same bytes, which are kept. A *recomputed* frame is
encoded again and may differ. So a run with int4 frames is not bit-identical after a death, unlike runs with
other codecs.
"""

from collections import OrderedDict
from collections.abc import Hashable

from partition.codecs.base import Array, Rounding, squared_norm


class Feedback:
    """Residuals by key: a link, a direction and the tensor's position in the bundle. Not thread-safe.

    They take at most `bytes_max` together. The least recently used residual is dropped first, and one that
    alone exceeds the limit is not kept. If a tensor's length changes (the last micro-batch may be short), its
    residual is dropped.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._residuals: OrderedDict[Hashable, Array] = OrderedDict()

    @property
    def size_bytes(self) -> int:
        """Return the size of all residuals."""
        return sum(residual.nbytes for residual in self._residuals.values())

    def add_to(self, key: Hashable, values: Array) -> None:
        """Add the residual to flat float32 values, in place, and remove it."""
        residual = self._residuals.pop(key, None)
        if residual is not None and residual.shape == values.shape:
            values += residual

    def keep(self, key: Hashable, wanted: Array, sent: Array) -> Rounding:
        """Store `wanted` - `sent` in the memory of `wanted`. Return the size of that rounding."""
        norm = squared_norm(wanted)
        wanted -= sent
        if wanted.nbytes <= self._bytes_max:
            self._residuals[key] = wanted
            while self.size_bytes > self._bytes_max:
                self._residuals.popitem(last=False)
        return Rounding(squared_norm(wanted), norm)

    def clear(self) -> None:
        """Remove all residuals, because their receivers are gone."""
        self._residuals.clear()
