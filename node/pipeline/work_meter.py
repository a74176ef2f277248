"""The work of one replica on the open step, counted for its report to the committer."""

from dataclasses import dataclass, field

from partition.codecs.codec import Rounding
from partition.steps.frames import Direction
from partition.steps.messages import Work


@dataclass
class WorkMeter:
    """Counts a replica's work from one applied step to the next."""

    busy_seconds: float = 0.0
    _forward_bytes: int = 0
    _gradient_bytes: int = 0
    _replayed: int = 0
    _sent_before: set[tuple[int, Direction]] = field(default_factory=set)
    _rounded: dict[bool, Rounding] = field(default_factory=lambda: {False: Rounding(), True: Rounding()})

    def rounded(self, rounding: Rounding, *, is_gradient: bool) -> None:
        """Add a codec's rounding error in a frame."""
        self._rounded[is_gradient] += rounding

    def sent(self, size_bytes: int, key: tuple[int, Direction] | None, *, is_gradient: bool) -> None:
        """Add a sent frame; `key` identifies a training frame, which may be sent again."""
        if is_gradient:
            self._gradient_bytes += size_bytes
        else:
            self._forward_bytes += size_bytes
        if key is not None:
            self._replayed += key in self._sent_before
            self._sent_before.add(key)

    def take(self) -> Work:
        """Return the work of a step that has ended, and start counting the next one."""
        lost = tuple((row.squared_error, row.squared_norm) for row in self._rounded.values())
        done = Work(
            int(self.busy_seconds * 1e9), self._forward_bytes, self._gradient_bytes, self._replayed, lost
        )
        self.busy_seconds, self._forward_bytes, self._gradient_bytes, self._replayed = 0.0, 0, 0, 0
        self._sent_before.clear()
        self._rounded = {False: Rounding(), True: Rounding()}
        return done
