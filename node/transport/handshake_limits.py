"""Limits on handshakes: they choose the next one to compute, so that unknown peers cost a bounded amount of
CPU.

The address of a connection cannot be forged, so each source has a limit of its own. A waiting connection is
not refused: it keeps its place in the queue for as long as any other may. The next handshake is one of the
source with the fewest recent handshakes, so a newcomer from elsewhere does not wait behind a crowd. Sources
from which a peer has proved its identity share a separate limit, which unknown sources cannot use up.
"""

from collections import OrderedDict
from collections.abc import Iterable

from crypto.token_buckets import Buckets, TokenBucket

STRANGERS_RATE = 100.0
"""Handshakes per second of all sources without a known peer. A handshake takes about 1 ms until the answer is
sent, and 2 ms in all. So this costs a tenth of a core for unfinished handshakes, and a fifth at most."""
STRANGERS_BURST = 200.0
"""Burst of such handshakes: when a node comes back, its whole neighbourhood connects to it within a
moment."""
KNOWN_RATE = 100.0
"""Handshakes per second of all sources where a peer has proved its identity: another fifth of a core at
most."""
KNOWN_BURST = 200.0
SOURCE_RATE = 50.0
"""Handshakes per second of one source: half of the total, because many nodes may share one address. A
handshake that ends in a proven peer is not counted, because it cost that peer as much as this node."""
SOURCE_BURST = 100.0
SOURCES_MAX = 4_096
"""Maximum number of sources whose rate is remembered, and of known sources; the latest of each are kept."""


class HandshakeGate:
    """Decides which handshakes to compute. `now` is any monotonic clock in seconds."""

    def __init__(self, now: float) -> None:
        self._strangers = TokenBucket(STRANGERS_RATE, STRANGERS_BURST, STRANGERS_BURST, now)
        self._known = TokenBucket(KNOWN_RATE, KNOWN_BURST, KNOWN_BURST, now)
        self._sources = Buckets[bytes](SOURCE_RATE, SOURCE_BURST, SOURCES_MAX)
        self._proved: OrderedDict[bytes, None] = OrderedDict()

    def choose(self, waiting: Iterable[bytes], now: float) -> bytes | None:
        """Return the source whose handshake is computed next, and count it. None means no handshake now."""
        left = {source: self._sources.left(source, now) for source in waiting}
        for common, is_known in ((self._known, True), (self._strangers, False)):
            fitting = [
                source
                for source, tokens in left.items()
                if tokens >= 1.0 and (source in self._proved) == is_known
            ]
            if fitting and common.take(now):
                source = max(fitting, key=left.__getitem__)
                self._sources.of(source, now).take(now)
                return source
        return None

    def proved(self, source: bytes, now: float) -> None:
        """Note that a handshake of this source has ended in a peer."""
        self._sources.of(source, now).give()
        self._proved[source] = None
        self._proved.move_to_end(source)
        if len(self._proved) > SOURCES_MAX:
            self._proved.popitem(last=False)
