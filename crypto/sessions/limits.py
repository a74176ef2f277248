"""Limits on the handshakes that this node computes: they bound the cost of unknown peers, no matter what
those send.

At a low rate, every handshake is computed, because limits per forgeable source address would only shut out
real sources. Above a certain rate a cookie is demanded, which proves the source address, and each source has
its own limit.
"""

from typing import Literal

from crypto.crowds import network_of
from crypto.sessions.macs import Source
from crypto.token_buckets import Buckets, TokenBucket, prefix_of

FREE_RATE = 100.0
"""Number of handshakes per second computed without a cookie. At 0.5 to 1 ms each, they use at most a tenth of
a core."""
FREE_BURST = 200.0
"""Burst of handshakes without a cookie: a node that comes back is contacted by its whole neighbourhood
simultaneously."""
SOURCE_RATE = 20.0
"""Number of handshakes per second of one proven source: enough for several nodes behind one address, each
with a few."""
SOURCE_BURST = 100.0
NETWORK_RATE = 60.0
"""Number of handshakes per second of one network (a /24, or a /48 of IPv6) while others need the rest.
Otherwise its owner could use up all capacity by changing sources."""
NETWORK_BURST = 200.0
SHOWN_RATE = 200.0
"""Number of handshakes per second of all sources that showed a cookie together: at most a fifth of a core."""
SHOWN_BURST = 400.0
SPARED = 200.0
"""The part of the burst that is kept for networks that have not used up their own limit; any network may use
the rest. A local network often has many honest nodes and is the only network, so it may exceed its limit."""
COOKIE_RATE = 5_000.0
"""Number of cookies handed out per second. At 20 us each, they use at most a tenth of a core."""
COOKIE_BURST = 5_000.0
SOURCES_MAX = 4_096
"""Number of sources, and of networks, whose rate is remembered; the most recently seen are kept."""

Verdict = Literal["compute", "cookie", "refuse"]


class HandshakeAdmission:
    """Decides whether to compute each handshake that a member of the swarm may have sent."""

    def __init__(self, now: float) -> None:
        self._free = TokenBucket(FREE_RATE, FREE_BURST, FREE_BURST, now)
        self._shown = TokenBucket(SHOWN_RATE, SHOWN_BURST, SHOWN_BURST, now)
        self._cookies = TokenBucket(COOKIE_RATE, COOKIE_BURST, COOKIE_BURST, now)
        self._sources = Buckets[bytes](SOURCE_RATE, SOURCE_BURST, SOURCES_MAX)
        self._networks = Buckets[bytes](NETWORK_RATE, NETWORK_BURST, SOURCES_MAX)

    def is_free(self, now: float) -> bool:
        """Count a handshake. Return whether it may be computed without a cookie."""
        return self._free.take(now)

    def judge(self, now: float, source: Source, *, shows_cookie: bool) -> Verdict:
        """Return the verdict on a handshake that is not free."""
        if not shows_cookie:
            return "cookie" if self._cookies.take(now) else "refuse"
        prefix = prefix_of(source[0])
        own, network = self._sources.of(prefix, now), self._networks.of(network_of(prefix), now)
        has_share = network.take(now) or self._shown.left(now) > SPARED
        return "compute" if has_share and own.take(now) and self._shown.take(now) else "refuse"
