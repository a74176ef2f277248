"""How many handshakes we compute, and for whom: what strangers cost is bounded, whatever they send.

As long as few handshakes come, each is computed: a limit on a source that anybody may forge would only shut
out the forged. Above a rate a cookie is demanded, and then sources are real and each has a limit of its own.
"""

import ipaddress
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

from crypto.sessions.macs import Source

FREE_RATE = 100.0
"""Handshakes a second without a cookie, at 0.5 to 1 ms each: a tenth of a core at most."""
FREE_BURST = 200.0
"""A node that comes back is met by its whole neighbourhood at once."""
SOURCE_RATE = 20.0
"""Handshakes a second of one real source: several nodes behind one address, each with few."""
SOURCE_BURST = 100.0
SHOWN_RATE = 200.0
"""Of all that showed a cookie together: a fifth of a core at most."""
SHOWN_BURST = 400.0
COOKIE_RATE = 5_000.0
"""Cookies handed out a second, at 20 us each: a tenth of a core at most."""
COOKIE_BURST = 5_000.0
SOURCES_MAX = 4_096
"""Sources whose rate is remembered, the latest seen."""

Verdict = Literal["compute", "cookie", "refuse"]


@dataclass(slots=True)
class Bucket:
    """A token bucket: `rate` a second, `burst` at once."""

    rate: float
    burst: float
    tokens: float
    at: float

    def left(self, now: float) -> float:
        """How many there are."""
        return min(self.burst, self.tokens + max(0.0, now - self.at) * self.rate)

    def take(self, now: float) -> bool:
        """Take one if there is one."""
        self.tokens = self.left(now)
        self.at = now
        if self.tokens < 1.0:
            return False
        self.tokens -= 1.0
        return True

    def give(self) -> None:
        """Put one back."""
        self.tokens = min(self.burst, self.tokens + 1.0)


class Admission:
    """Decides over each handshake that a member of the swarm may have sent."""

    def __init__(self, now: float) -> None:
        self._free = Bucket(FREE_RATE, FREE_BURST, FREE_BURST, now)
        self._shown = Bucket(SHOWN_RATE, SHOWN_BURST, SHOWN_BURST, now)
        self._cookies = Bucket(COOKIE_RATE, COOKIE_BURST, COOKIE_BURST, now)
        self._sources: OrderedDict[bytes, Bucket] = OrderedDict()

    def is_free(self, now: float) -> bool:
        """Whether a handshake may be computed without a cookie; this one counts."""
        return self._free.take(now)

    def judge(self, now: float, source: Source, *, shows_cookie: bool) -> Verdict:
        """What becomes of a handshake that is not free."""
        if not shows_cookie:
            return "cookie" if self._cookies.take(now) else "refuse"
        return "compute" if self._of(source, now).take(now) and self._shown.take(now) else "refuse"

    def _of(self, source: Source, now: float) -> Bucket:
        prefix = prefix_of(source)
        bucket = self._sources.get(prefix)
        if bucket is None:
            bucket = self._sources[prefix] = Bucket(SOURCE_RATE, SOURCE_BURST, SOURCE_BURST, now)
            if len(self._sources) > SOURCES_MAX:
                self._sources.popitem(last=False)
        self._sources.move_to_end(prefix)
        return bucket


def prefix_of(source: Source) -> bytes:
    """What one owner of addresses cannot leave: an IPv4 address, the first 64 bits of an IPv6 address."""
    address = ipaddress.ip_address(source[0])
    if isinstance(address, ipaddress.IPv6Address):
        mapped = address.ipv4_mapped
        return address.packed[:8] if mapped is None else mapped.packed
    return address.packed
