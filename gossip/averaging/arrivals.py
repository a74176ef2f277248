"""The upload rate of each member of an attempt, measured by the receivers of its data.

An owner reports to each sender how many of its bytes arrived, and when the last one arrived since the
beginning of the attempt (`Arrived`). So socket buffers, which accept megabytes instantly, do not distort the
measurement, and no peer's claim about itself is needed. Both times come from the receiver's clock. The
estimate counts latency and the sender's computing as sending, so it is too low for small amounts of data, but
for all members alike.
"""

from math import exp2, log2

from gossip.averaging.group import RATE_MAX, RATE_UNKNOWN
from gossip.averaging.messages import Arrived

STEPS_PER_OCTAVE = 4
"""Rates are rounded to this many values per factor of two, so that members with similar rates get equal parts
despite noise."""
GAIN = 0.5
"""The weight of a new measurement in the moving average."""
SECONDS_MIN = 1e-4


class Arrivals:
    """One member's measurements in one attempt."""

    def __init__(self, attempt: bytes, begun_at: float) -> None:
        self._attempt = attempt
        self._begun_at = begun_at
        self._came: dict[int, tuple[int, float]] = {}
        self._told: dict[int, Arrived] = {}

    def note(self, now: float, place: int, size_bytes: int) -> None:
        """Count bytes that came from the member at `place`."""
        if size_bytes:
            before = self._came.get(place, (0, now))[0]
            self._came[place] = before + size_bytes, now

    @property
    def sizes(self) -> dict[int, int]:
        """Return the bytes received from each place."""
        return {place: size for place, (size, _) in self._came.items()}

    def told(self) -> dict[int, Arrived]:
        """Return the report for each sender."""
        return {
            place: Arrived(self._attempt, size, max(0, int((at - self._begun_at) * 1e6)))
            for place, (size, at) in self._came.items()
        }

    def take(self, place: int, message: Arrived, sent_bytes_max: int) -> None:
        """Apply an owner's report about this member's bytes. Reported bytes beyond those sent do not
        count."""
        if message.size_bytes <= sent_bytes_max:
            self._told.setdefault(place, message)

    @property
    def upload_rate(self) -> float | None:
        """Return this member's upload rate in bytes per second; None without reports. Of three or more
        reports the slowest is ignored, because its author may be slow itself, or lie."""
        seconds = sorted(each.microseconds / 1e6 for each in self._told.values())
        if not seconds:
            return None
        size = sum(each.size_bytes for each in self._told.values())
        return size / max(SECONDS_MIN, seconds[-2] if len(seconds) > 2 else seconds[-1])


class UploadRate:
    """The upload rate that a peer claims, based on its previous attempts."""

    def __init__(self) -> None:
        self._mean: float | None = None

    @property
    def claimed(self) -> int:
        """The rate in bytes per second, rounded; RATE_UNKNOWN until something has been measured."""
        if self._mean is None:
            return RATE_UNKNOWN
        step = round(log2(max(self._mean, 2.0)) * STEPS_PER_OCTAVE) / STEPS_PER_OCTAVE
        return max(RATE_UNKNOWN + 1, min(RATE_MAX, round(exp2(step))))

    def measured(self, rate: float | None) -> None:
        """Add the rate that an attempt measured; None is ignored."""
        if rate is not None:
            self._mean = rate if self._mean is None else self._mean + GAIN * (rate - self._mean)
