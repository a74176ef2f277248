"""Decides which peers get messages by streams because datagrams do not get through.

No I/O. Some networks drop UDP but let TCP through. If no datagram session can be established with a peer that
has answered before, its messages go by streams from then on. A datagram is still tried now and then, and the
first authentic datagram from the peer ends this. In addition, an answer uses the transport of its question:
if a peer has just sent a short message by a stream, and no datagram recently, messages to it go by streams
for a moment.
"""

from collections import OrderedDict
from dataclasses import dataclass
from math import inf

from crypto.identity import PeerId

ANSWER_SECONDS = 0.5
"""How long a message by a stream makes the answers use streams. A core answers within this time. If it were
longer, a peer that lost one datagram would go without datagrams for too long."""
SILENCE_SECONDS = 5.0
"""If a peer has sent no datagram for this long, its questions by stream are answered by streams. A shorter
time would be wrong: on a slow path pings go by streams as well, although datagrams arrive and are faster."""
KNOCK_SECONDS = 60.0
"""Seconds between datagrams that are tried to a peer that gets its messages by streams."""
DOUBT_SECONDS = 20.0
"""How long nothing is sent by streams after a stream could not be opened either. The peer is probably gone,
and a connection for each message would cost its network more than noticing its death late costs us."""
PEERS_MAX = 4_096
"""Maximum number of peers remembered, as in the address book for peers that have answered."""


@dataclass(slots=True)
class _Path:
    answers_until: float = -1.0
    asked_at: float = -inf
    is_blocked: bool = False
    is_proved: bool = False
    knock_at: float = 0.0
    doubted_until: float = -1.0


class DatagramPaths:
    """The peers reached by streams, and why. `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._paths: OrderedDict[PeerId, _Path] = OrderedDict()

    def __len__(self) -> int:
        return len(self._paths)

    @property
    def blocked(self) -> tuple[PeerId, ...]:
        """The peers that are reached by streams but by no datagram."""
        return tuple(peer for peer, path in self._paths.items() if path.is_blocked and path.is_proved)

    def is_by_stream(self, peer: PeerId, now: float) -> bool:
        """Return whether a message to `peer` must go by a stream."""
        path = self._paths.get(peer)
        if path is None or now < path.doubted_until:
            return False
        return path.is_blocked or now <= path.answers_until

    def knocks(self, peer: PeerId, now: float) -> bool:
        """Return whether to try a datagram now, and record the attempt."""
        path = self._paths.get(peer)
        if path is None or not path.is_blocked or now < path.knock_at:
            return False
        path.knock_at = now + KNOCK_SECONDS
        return True

    def asked(self, peer: PeerId, now: float, heard_at: float) -> None:
        """Record that a short message (one that fits a datagram) came from `peer` by a stream. `heard_at` is
        when its latest datagram came."""
        path = self._path(peer)
        if now - heard_at > SILENCE_SECONDS:
            path.answers_until = now + ANSWER_SECONDS
        path.is_proved, path.doubted_until, path.asked_at = True, -1.0, now

    def has_just_asked(self, peer: PeerId, now: float) -> bool:
        """Return whether a short message came from `peer` by a stream a moment ago, and no datagram has come
        since."""
        path = self._paths.get(peer)
        return path is not None and now - path.asked_at <= ANSWER_SECONDS

    def has_asked(self, peer: PeerId) -> bool:
        """Return whether a stream from `peer` or to `peer` is known to have got through."""
        path = self._paths.get(peer)
        return path is not None and path.is_proved

    def unanswered(self, peer: PeerId, now: float) -> None:
        """Note that `peer`, which has answered before, does not answer our datagram handshakes."""
        path = self._path(peer)
        if not path.is_blocked and now >= path.doubted_until:
            path.is_blocked, path.knock_at = True, now + KNOCK_SECONDS

    def streamed(self, peer: PeerId) -> None:
        """Note that a message was sent to `peer` by a stream."""
        path = self._paths.get(peer)
        if path is not None:
            path.is_proved = True

    def failed(self, peer: PeerId, now: float) -> None:
        """Note that no stream could be opened to `peer` either."""
        path = self._paths.get(peer)
        if path is not None:
            path.is_blocked = path.is_proved = False
            path.doubted_until = now + DOUBT_SECONDS

    def heard(self, peer: PeerId) -> None:
        """Note that an authentic datagram came from `peer`."""
        if self._paths:
            self._paths.pop(peer, None)

    def _path(self, peer: PeerId) -> _Path:
        path = self._paths.get(peer)
        if path is None:
            path = self._paths[peer] = _Path()
            if len(self._paths) > PEERS_MAX:
                self._paths.popitem(last=False)
        return path
