"""Users' broadcasts to all members, by topic. A newer broadcast with the same author and topic replaces the
older one.

They are disseminated as facts (signed statements, see `gossip.dissemination`), at lower priority than
membership updates. Delivery is epidemic and at most once: a member that joins later receives none, and if an
author sends several within a short time, possibly only the newest arrives. In a swarm that is divided into
neighbourhoods, a broadcast reaches only its author's neighbourhood.

An author may send a burst of BROADCASTS_MAX, then one every BROADCAST_INTERVALS probe intervals. Broadcasts
above this rate are queued; for each topic only the newest is kept. Receivers limit every author to twice that
rate. Sequence numbers start at the author's incarnation or higher, so they are never reused after a restart.
"""

from math import inf

from crypto.errors import LocalProtocolError
from crypto.identity import PEER_ID_BYTES, PeerId
from crypto.token_buckets import Buckets, TokenBucket
from gossip.messages import BROADCAST_BYTES_MAX, TOPIC_BYTES_MAX, BroadcastBody
from gossip.settings import SwimSettings

BROADCASTS_MAX = 8.0
BROADCAST_INTERVALS = 10.0
"""Number of probe intervals between two broadcasts of one author. A broadcast costs every member about ten
sends of its size. In the `lan` preset, an author that continuously sends 512 bytes costs 0.6 kB/s."""
RECEIVER_FACTOR = 2.0
"""The rate that a receiver allows, as a multiple of the author's rate, because broadcasts that were delayed
on the way arrive in bursts."""
TOPICS_MAX = 16
"""Number of topics per author for which the latest sequence number is kept. For forgotten topics, sequence
numbers up to the highest forgotten one are refused."""
DUE_SLACK_SECONDS = 0.001
PASSED_ON_MAX = 64.0
PASSED_ON_INTERVALS = 2.0
"""Limit on forwarding, over all authors: the burst size, and the number of probe intervals after which one
more is allowed."""


class Broadcasts:
    """This peer's own broadcasts, and the sequence numbers it knows of other authors."""

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
        # Per author: the latest sequence number of each topic, and the highest sequence number of forgotten
        # topics.
        self._heard: dict[PeerId, tuple[dict[bytes, int], int]] = {}
        self._waiting: dict[bytes, bytes] = {}

    def __len__(self) -> int:
        return len(self._heard)

    def due(self, now: float) -> float:
        """The time at which the next queued broadcast may be sent, in monotonic seconds; inf if none is
        queued."""
        if not self._waiting:
            return inf
        # Slightly late, because a sum of floats may be a little less than one.
        return now + max(0.0, 1.0 - self._own.left(now)) / self._own.rate + DUE_SLACK_SECONDS

    def put(self, topic: bytes, data: bytes) -> None:
        """Queue `data` under `topic`; it replaces data already queued there. Raises LocalProtocolError."""
        if not 0 < len(topic) <= TOPIC_BYTES_MAX:
            raise LocalProtocolError(f"a topic has 1 to {TOPIC_BYTES_MAX} bytes, not {len(topic)}")
        if len(data) > BROADCAST_BYTES_MAX:
            raise LocalProtocolError(f"a broadcast has at most {BROADCAST_BYTES_MAX} bytes, not {len(data)}")
        if topic not in self._waiting and len(self._waiting) >= TOPICS_MAX:
            raise LocalProtocolError(
                f"{TOPICS_MAX} topics already have a broadcast waiting; broadcast less often"
            )
        self._waiting[topic] = data

    def take(self, now: float, incarnation: int) -> list[BroadcastBody]:
        """Return the broadcasts that may be sent now."""
        bodies = []
        while self._waiting and self._own.take(now):
            topic = next(iter(self._waiting))
            self._sequence = max(self._sequence + 1, incarnation)
            bodies.append(BroadcastBody(topic, self._sequence, self._waiting.pop(topic)))
        return bodies

    def is_news(self, now: float, author: PeerId, body: BroadcastBody) -> bool:
        """Return whether a broadcast is worth checking: it must be newer than the latest one of its topic,
        and within its author's rate."""
        topics, floor = self._heard.get(author, ({}, -1))
        return body.sequence > topics.get(body.topic, floor) and self._rates.left(author, now) >= 1.0

    def hear(self, now: float, author: PeerId, body: BroadcastBody) -> bool:
        """Record a broadcast with a valid signature. Return whether to forward it."""
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
    """Return the queue key for broadcasts of one author and topic. It is longer than any real peer id, so it
    cannot collide with one."""
    key = PeerId(author + topic)
    assert len(key) > PEER_ID_BYTES, "a topic must not be empty"
    return key
