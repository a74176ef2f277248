"""The limits on handshakes that we compute: the cost of strangers is bounded, whatever they send.

While few handshakes come, each is computed: limits on forgeable sources would only shut out real ones. Above
a certain rate a cookie is demanded, which proves the source, and each source has its own limit.
"""

from typing import Literal

from crypto.crowds import network_of
from crypto.sessions.macs import Source
from crypto.token_buckets import Buckets, TokenBucket, prefix_of

FREE_RATE = 100.0
"""Handshakes a second without a cookie, at 0.5 to 1 ms each: a tenth of a core at most."""
FREE_BURST = 200.0
"""A node that comes back is met by its whole neighbourhood at once."""
SOURCE_RATE = 20.0
"""Handshakes a second of one real source: several nodes behind one address, each with few."""
SOURCE_BURST = 100.0
NETWORK_RATE = 60.0
"""The share of one network (a /24, or a /48 of IPv6) while others need the rest: its owner could use up all
shares by changing sources."""
NETWORK_BURST = 200.0
SHOWN_RATE = 200.0
"""The rate of all that showed a cookie together: a fifth of a core at most."""
SHOWN_BURST = 400.0
SPARED = 200.0
"""The part of this rate kept for networks that have not used up their own; any network may use the rest. A
local network is often one of many honest nodes, and the only one."""
COOKIE_RATE = 5_000.0
"""Cookies handed out a second, at 20 us each: a tenth of a core at most."""
COOKIE_BURST = 5_000.0
SOURCES_MAX = 4_096
"""Sources whose rate is remembered, the latest seen, and as many networks."""

Verdict = Literal["compute", "cookie", "refuse"]


class HandshakeAdmission:
    """Decides on each handshake that a member of the swarm may have sent."""

    def __init__(self, now: float) -> None:
        self._free = TokenBucket(FREE_RATE, FREE_BURST, FREE_BURST, now)
        self._shown = TokenBucket(SHOWN_RATE, SHOWN_BURST, SHOWN_BURST, now)
        self._cookies = TokenBucket(COOKIE_RATE, COOKIE_BURST, COOKIE_BURST, now)
        self._sources = Buckets[bytes](SOURCE_RATE, SOURCE_BURST, SOURCES_MAX)
        self._networks = Buckets[bytes](NETWORK_RATE, NETWORK_BURST, SOURCES_MAX)

    def is_free(self, now: float) -> bool:
        """Count a handshake; return whether it may be computed without a cookie."""
        return self._free.take(now)

    def judge(self, now: float, source: Source, *, shows_cookie: bool) -> Verdict:
        """Return the verdict on a handshake that is not free."""
        if not shows_cookie:
            return "cookie" if self._cookies.take(now) else "refuse"
        prefix = prefix_of(source[0])
        own, network = self._sources.of(prefix, now), self._networks.of(network_of(prefix), now)
        has_share = network.take(now) or self._shown.left(now) > SPARED
        return "compute" if has_share and own.take(now) and self._shown.take(now) else "refuse"
