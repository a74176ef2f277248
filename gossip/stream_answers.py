"""The pings that are answered by a stream: those of members that ask for it, at most as often as a member
probes.

Opening a stream costs more than asking for one, and it goes to an address that the asker claims. So a
stranger is answered by a datagram, and so is a member that asks more often.
"""

from collections.abc import Callable

from crypto.identity import PeerId
from crypto.token_buckets import Buckets
from gossip.messages import Ack, ByStream, Ping, StreamPing

BURST = 2.0
"""Answers to one member at once, one more each probe interval: it probes in its round, and again where others
suspect us."""
ASKERS_MAX = 512
"""Members whose recent answers by stream are counted."""


class StreamAnswers:
    """Chooses how this peer answers pings; `is_live` returns whether a peer is a live member."""

    __slots__ = ("_buckets", "_is_live")

    def __init__(self, is_live: Callable[[PeerId], bool], probe_interval_seconds: float) -> None:
        self._is_live = is_live
        self._buckets = Buckets[PeerId](1.0 / probe_interval_seconds, BURST, ASKERS_MAX)

    def __len__(self) -> int:
        return len(self._buckets)

    def choose(self, now: float, sender: PeerId, ping: Ping | StreamPing, ack: Ack) -> Ack | ByStream:
        """Return the ack of a ping, to be sent by a datagram or a stream."""
        if isinstance(ping, Ping) or not self._is_live(sender):
            return ack
        return ByStream(ack, is_answer=True) if self._buckets.of(sender, now).take(now) else ack
