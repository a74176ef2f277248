"""Rounding errors of int4, kept by the sender and added to its next tensor in the same place.

Error feedback (Seide et al. 2014, "1-bit stochastic gradient descent"; Karimireddy et al. 2019): the next
gradient makes up for the loss of the last, so over many micro-batches nothing is lost in sum. It acts only on
encoding: a frame that is sent again is the same bytes, kept since the first time. A *recomputed* frame is
another encoding and may differ, so a run with int4 frames is not the same to the bit after a death, unlike
runs with other codecs.
"""

from collections import OrderedDict
from collections.abc import Hashable

from partition.codecs.base import Array, Rounding, squared_norm


class Feedback:
    """Residuals by key: a link, a direction and the tensor's place in the bundle. Not thread-safe.

    They take at most `bytes_max` together; the one unused for longest goes first, and one that is larger
    alone is not kept. A residual of another length (the last micro-batch may be short) is forgotten.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._residuals: OrderedDict[Hashable, Array] = OrderedDict()

    @property
    def size_bytes(self) -> int:
        """Return the size of all residuals."""
        return sum(residual.nbytes for residual in self._residuals.values())

    def add_to(self, key: Hashable, values: Array) -> None:
        """Add the residual to flat float32 values, in place, and forget it."""
        residual = self._residuals.pop(key, None)
        if residual is not None and residual.shape == values.shape:
            values += residual

    def keep(self, key: Hashable, wanted: Array, sent: Array) -> Rounding:
        """Remember `wanted` - `sent`, in the memory of `wanted`; return how much that is."""
        norm = squared_norm(wanted)
        wanted -= sent
        if wanted.nbytes <= self._bytes_max:
            self._residuals[key] = wanted
            while self.size_bytes > self._bytes_max:
                self._residuals.popitem(last=False)
        return Rounding(squared_norm(wanted), norm)

    def clear(self) -> None:
        """Drop all residuals: their receivers are gone."""
        self._residuals.clear()
