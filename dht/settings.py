"""The DHT's settings: the effect, the bounds and a good default of each."""

from dataclasses import dataclass

from dht.messages import HINTS_MAX, MESSAGE_BYTES_MAX
from dht.work import WORK_BITS_MAX

PAYLOAD_BYTES_MIN = 300
"""Minimum for `payload_bytes_max`: room for a reply's head and a few hints. With less, lookups could not make
progress."""


@dataclass(frozen=True)
class KademliaSettings:
    """Frozen settings, checked at construction (ValueError). The defaults suit a swarm on the internet."""

    k: int = 20
    """Number of contacts in a bucket, and of replicas of a record; 1 to HINTS_MAX. 20 replicas outlast an
    hour of churn."""

    group_max: int = 3
    """Number of contacts of one address group among the nearest, if there are others; 1 or more. As in
    go-libp2p. A higher value helps attackers with many ids in one network, a lower one hurts honest nodes
    that share a network."""

    groups_local: bool = False
    """Whether loopback and private networks are address groups too. Many honest nodes share their few
    addresses, so this makes them harder to find in a swarm that is partly on such networks."""

    alpha: int = 3
    """Number of requests that a lookup keeps in flight; 1 to `k`. More is faster and costs more messages. In
    its last round, when no nearer peer turns up, a lookup asks all of the `k` nearest."""

    find_width: int = 8
    """A find that has found a record ends when this many of the nearest live nodes have answered; 1 to `k`. A
    higher value finds newer records and more publishers. A find without a record always asks `k`."""

    request_seconds: float = 0.5
    """How long at most to wait for a silent peer of which nothing is known before passing it over; over 0. A
    request is sent a second time after the usual round trip, at the latest after half of this."""

    request_seconds_max: float = 3.0
    """The same for a peer that is known to be far or slow: three times its usual answer time, but at most
    this; at least `request_seconds`."""

    paths: int = 4
    """Number of disjoint paths of an important lookup (S/Kademlia); 1 or more. A liar can spoil only the path
    it is on, and each path costs about as many requests as a whole lookup."""

    work_bits: int = 0
    """Proof of work, in bits, that an id needs to be asked, pinged or answered (`work`); 0 (none) to
    WORK_BITS_MAX. All nodes of a swarm need the same value."""

    late_seconds: float = 2.0
    """How long after a request was given up its answer is still accepted; 0 or more."""

    failures_max: int = 3
    """Number of requests in a row that a contact may leave unanswered before it is removed; 1 or more."""

    recheck_seconds: float = 5.0
    """How long after a failure the contact is pinged again; above `request_seconds`."""

    checks_max: int = 64
    """Number of pings in flight to peers that are not verified, or failed; 1 or more. Unknown peers beyond
    this are answered, but not pinged."""

    fresh_seconds: float = 60.0
    """A contact heard from within this time is not pinged to make room for a newcomer; 0 or more."""

    refresh_seconds: float = 600.0
    """A bucket is refreshed if nothing in it was looked up for this long, plus or minus a quarter; above
    `refresh_gap_seconds`."""

    refresh_gap_seconds: float = 2.0
    """Minimum time between two refreshes, so that they do not come in a burst; above 0."""

    rejoin_seconds: float = 10.0
    """How long to wait after a `join` that nobody answered, or after the table became empty, before the peers
    of the latest `join` are asked again; above `request_seconds`."""

    republish_seconds: float = 1_800.0
    """How often a node stores its own records again, plus or minus a tenth; above 0. 30 minutes keeps 19 of
    20 replicas alive at a median session of an hour."""

    republish_gap_seconds: float = 0.5
    """Minimum time between two records that a node stores again for others; above 0. This republishing keeps
    the records of a publisher that is gone: the first holder that finds them overdue stores them again."""

    advert_seconds: float = 900.0
    """How long an advert stays valid; above `advert_renew_seconds`, because its holders may leave too."""

    advert_renew_seconds: float = 300.0
    """How often an advert is signed again, up to a fifth sooner; above 0."""

    holders_min: int = 3
    """A store that reaches fewer holders has failed, unless the network or `k` is smaller; 1 or more."""

    handover_max: int = 64
    """Maximum number of records sent to one newcomer, the nearest to it first; 0 or more."""

    repairs_max: int = 2
    """Maximum number of copies that a find leaves on nodes that answered without the record; 0 or more."""

    cache_seconds: float = 300.0
    """How long a node that is not near the key keeps such a copy; 0 or more."""

    cache_max: int = 256
    """Maximum number of such copies that a node keeps; 0 or more."""

    lost_max: int = 64
    """Maximum number of silent contacts that are occasionally tried again, so that a network that was split
    can merge; 0 or more."""

    lost_retry_seconds: float = 60.0
    """Minimum time between two such tries; above 0."""

    lookup_requests_max: int = 128
    """Maximum number of requests in one lookup; at least `k`. An honest lookup needs about `k` + 10."""

    lookup_seconds_max: float = 20.0
    """A lookup ends after this time with the results so far; above `request_seconds`. Only liars can make a
    lookup take this long."""

    pages_max: int = 16
    """Maximum number of pages of records that a find requests from one holder; 1 or more."""

    found_max: int = 256
    """Maximum number of publishers that one find collects; 1 or more. Any further ones are ignored."""

    payload_bytes_max: int = 1_000
    """Maximum encoded size of a reply; PAYLOAD_BYTES_MIN to half of MESSAGE_BYTES_MAX. With the default, a
    reply and its envelope fit a datagram. A reply may contain one record even if that exceeds this size."""

    records_max: int = 10_000
    """Maximum number of records that this node holds, its own included; 1 or more. Each takes about 1.5
    kB."""

    records_per_source_max: int = 2_000
    """Maximum number of these that may come from one non-local address; 1 or more. With a fifth of
    `records_max`, nobody can fill the store alone, but many nodes behind one NAT can store less on one
    node."""

    records_per_key_max: int = 64
    """Maximum number of publishers under one key; 1 to `records_max`."""

    records_per_publisher_max: int = 256
    """Maximum number of keys of one publisher; 1 to `records_max`."""

    expiry_check_seconds: float = 60.0
    """How often expired records are removed; above 0. They are not handed out in the meantime."""

    def __post_init__(self) -> None:
        wrong = [name for name, holds in self._bounds().items() if not holds]
        if wrong:
            raise ValueError(f"DHT settings out of bounds: {', '.join(wrong)}")

    def _bounds(self) -> dict[str, bool]:
        return {
            "k": 1 <= self.k <= HINTS_MAX,
            "group_max": self.group_max >= 1,
            "alpha": 1 <= self.alpha <= self.k,
            "find_width": 1 <= self.find_width <= self.k,
            "request_seconds": self.request_seconds > 0,
            "request_seconds_max": self.request_seconds_max >= self.request_seconds,
            "work_bits": 0 <= self.work_bits <= WORK_BITS_MAX,
            "paths": self.paths >= 1,
            "late_seconds": self.late_seconds >= 0,
            "failures_max": self.failures_max >= 1,
            "recheck_seconds": self.recheck_seconds > self.request_seconds,
            "checks_max": self.checks_max >= 1,
            "fresh_seconds": self.fresh_seconds >= 0,
            "refresh_seconds": self.refresh_seconds > self.refresh_gap_seconds,
            "refresh_gap_seconds": self.refresh_gap_seconds > 0,
            "rejoin_seconds": self.rejoin_seconds > self.request_seconds,
            "republish_seconds": self.republish_seconds > 0,
            "republish_gap_seconds": self.republish_gap_seconds > 0,
            "advert_seconds": self.advert_seconds > self.advert_renew_seconds,
            "advert_renew_seconds": self.advert_renew_seconds > 0,
            "holders_min": self.holders_min >= 1,
            "handover_max": self.handover_max >= 0,
            "repairs_max": self.repairs_max >= 0,
            "cache_seconds": self.cache_seconds >= 0,
            "cache_max": self.cache_max >= 0,
            "lost_max": self.lost_max >= 0,
            "lost_retry_seconds": self.lost_retry_seconds > 0,
            "lookup_requests_max": self.lookup_requests_max >= self.k,
            "lookup_seconds_max": self.lookup_seconds_max > self.request_seconds,
            "pages_max": self.pages_max >= 1,
            "found_max": self.found_max >= 1,
            "payload_bytes_max": PAYLOAD_BYTES_MIN <= self.payload_bytes_max <= MESSAGE_BYTES_MAX // 2,
            "records_max": self.records_max >= 1,
            "records_per_source_max": self.records_per_source_max >= 1,
            "records_per_key_max": 1 <= self.records_per_key_max <= self.records_max,
            "records_per_publisher_max": 1 <= self.records_per_publisher_max <= self.records_max,
            "expiry_check_seconds": self.expiry_check_seconds > 0,
        }
