"""Broadcasts of users to all members, by topic. A newer one of the same author and topic replaces the older.

They travel as facts, after membership's own (`gossip.dissemination`). Delivery is epidemic and at most once:
a member that joins later receives none, and of several in short time only the newest may arrive. In a swarm
of neighbourhoods a broadcast stays within that of its author.

An author sends BROADCASTS_MAX at once, then one in BROADCAST_INTERVALS. Faster ones wait, only the newest of
each topic. Receivers limit every author to twice that rate. A sequence is at least its author's incarnation,
so none of an earlier life is repeated.
"""

from math import inf

from crypto.errors import LocalProtocolError
from crypto.identity import PEER_ID_BYTES, PeerId
from crypto.token_buckets import Buckets, TokenBucket
from gossip.messages import BROADCAST_BYTES_MAX, TOPIC_BYTES_MAX, BroadcastBody
from gossip.settings import SwimSettings

BROADCASTS_MAX = 8.0
BROADCAST_INTERVALS = 10.0
"""A broadcast costs every member some ten sends of its size. In the `lan` preset, an author that sends 512
bytes continuously costs 0.6 kB/s."""
RECEIVER_FACTOR = 2.0
"""Factor of an author's rate that a receiver allows, since broadcasts that waited on the way arrive in
bursts."""
TOPICS_MAX = 16
"""Topics of one author whose last sequence is remembered. For others, older sequences are refused."""
DUE_SLACK_SECONDS = 0.001
PASSED_ON_MAX = 64.0
PASSED_ON_INTERVALS = 2.0
"""Broadcasts of all authors together that are passed on at once, and the probe intervals per further one."""


class Broadcasts:
    """This peer's own broadcasts, and the sequences it knows of others."""

    __slots__ = ("_heard", "_own", "_passed_on", "_rates", "_sequence", "_waiting")

    def __init__(self, settings: SwimSettings, incarnation: int, now: float) -> None:
        interval_seconds, authors_max = settings.probe_interval_seconds, settings.members_max
        rate = 1 / (BROADCAST_INTERVALS * interval_seconds)
        self._own = TokenBucket(rate, BROADCASTS_MAX, BROADCASTS_MAX, now)
        self._rates: Buckets[PeerId] = Buckets(
            RECEIVER_FACTOR * rate, RECEIVER_FACTOR * BROADCASTS_MAX, authors_max
        )
        rate = 1 / (PASSED_ON_INTERVALS * interval_seconds)
        self._passed_on = TokenBucket(rate, PASSED_ON_MAX, PASSED_ON_MAX, now)
        self._sequence = incarnation
        # Per author, the last sequence by topic, and the highest sequence of forgotten topics.
        self._heard: dict[PeerId, tuple[dict[bytes, int], int]] = {}
        self._waiting: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self._heard)

    def due(self, now: float) -> float:
        """The time at which the next waiting one may be sent, in monotonic seconds; inf for none."""
        if not self._waiting:
            return inf
        # Slightly late, since a sum of floats may be a little less than one.
        return now + max(0.0, 1.0 - self._own.left(now)) / self._own.rate + DUE_SLACK_SECONDS

    def put(self, topic: bytes, data: bytes) -> None:
        """Queue `data` under `topic`, in place of what waits there. Raises LocalProtocolError."""
        if not 0 < len(topic) <= TOPIC_BYTES_MAX:
            raise LocalProtocolError(f"a topic has 1 to {TOPIC_BYTES_MAX} bytes, not {len(topic)}")
        if len(data) > BROADCAST_BYTES_MAX:
            raise LocalProtocolError(f"a broadcast has at most {BROADCAST_BYTES_MAX} bytes, not {len(data)}")
        if topic not in self._waiting and len(self._waiting) >= TOPICS_MAX:
            raise LocalProtocolError(f"{TOPICS_MAX} topics wait to be told; tell less often")
        self._waiting[topic] = data

    def take(self, now: float, incarnation: int) -> list[BroadcastBody]:
        """Return the broadcasts that may go out now."""
        bodies = []
        while self._waiting and self._own.take(now):
            topic = next(iter(self._waiting))
            self._sequence = max(self._sequence + 1, incarnation)
            bodies.append(BroadcastBody(topic, self._sequence, self._waiting.pop(topic)))
        return bodies

    def is_news(self, now: float, author: PeerId, body: BroadcastBody) -> bool:
        """Return whether a broadcast is worth checking: newer than the last of its topic, and within its
        author's rate."""
        topics, floor = self._heard.get(author, ({}, -1))
        return body.sequence > topics.get(body.topic, floor) and self._rates.left(author, now) >= 1.0

    def hear(self, now: float, author: PeerId, body: BroadcastBody) -> bool:
        """Record a broadcast with a valid signature; return whether to pass it on."""
        self._rates.of(author, now).take(now)
        topics, floor = self._heard.setdefault(author, ({}, -1))
        topics.pop(body.topic, None)
        topics[body.topic] = body.sequence
        if len(topics) > TOPICS_MAX:
            oldest = min(topics, key=lambda topic: topics[topic])
            self._heard[author] = topics, max(floor, topics.pop(oldest))
        return self._passed_on.take(now)

    def forget(self, author: PeerId) -> None:
        """Forget an author that is no longer listed."""
        self._heard.pop(author, None)


def queue_key(author: PeerId, topic: bytes) -> PeerId:
    """Return the subject under which news of one author's topic is queued; it is no peer's id."""
    key = PeerId(author + topic)
    assert len(key) > PEER_ID_BYTES, "no topic is empty"
    return key
