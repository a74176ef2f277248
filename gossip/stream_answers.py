"""Decides which pings are answered over a stream: those of members that ask for it, at most as often as a
member probes.

Opening a stream costs more than requesting one, and the stream goes to an address that the asker claims. So a
peer that is not a member is answered by a datagram, and so is a member that asks more often.
"""

from collections.abc import Callable

from crypto.identity import PeerId
from crypto.token_buckets import Buckets
from gossip.messages import Ack, ByStream, Ping, StreamPing

BURST = 2.0
"""Burst of answers to one member; one more is allowed per probe interval. A member probes us in its round,
and again if others suspect us."""
ASKERS_MAX = 512
"""Maximum number of members whose recent answers over streams are counted."""


class StreamAnswers:
    """Chooses how this peer answers pings. `is_live` returns whether a peer is a live member."""

    __slots__ = ("_buckets", "_is_live")

    def __init__(self, is_live: Callable[[PeerId], bool], probe_interval_seconds: float) -> None:
        self._is_live = is_live
        self._buckets = Buckets[PeerId](1.0 / probe_interval_seconds, BURST, ASKERS_MAX)

    def __len__(self) -> int:
        return len(self._buckets)

    def choose(self, now: float, sender: PeerId, ping: Ping | StreamPing, ack: Ack) -> Ack | ByStream:
        """Return the ack of a ping, marked for a stream or as a plain datagram."""
        if isinstance(ping, Ping) or not self._is_live(sender):
            return ack
        return ByStream(ack, is_answer=True) if self._buckets.of(sender, now).take(now) else ack
