"""The DHT's settings: what each does, its bounds against its siblings, and a good value."""

from dataclasses import dataclass

from dht.messages import HINTS_MAX, MESSAGE_BYTES_MAX
from dht.work import WORK_BITS_MAX

PAYLOAD_BYTES_MIN = 300
"""Room for a reply's head and a few hints; less would make lookups blind."""


@dataclass(frozen=True)
class KademliaSettings:
    """Frozen, checked at construction (ValueError). The defaults suit a swarm over the internet."""

    k: int = 20
    """Contacts in a bucket and replicas of a record; 1 to HINTS_MAX. 20 outlives an hour of churn."""

    group_max: int = 3
    """Contacts of one address group among the nearest, while there are others; 1 or more. As in go-libp2p: a
    higher value helps attackers with many ids in one network, a lower one hurts honest nodes that share
    one."""

    groups_local: bool = False
    """Whether loopback and private networks are address groups as well. Their nodes are many and at few
    addresses, so a swarm that is partly there would find them worse."""

    alpha: int = 3
    """Requests that a lookup keeps in flight; 1 to `k`. More is faster and costs more messages.
    In its last round, when nobody nearer turns up, it asks all of the `k` nearest."""

    find_width: int = 8
    """A find that holds a record ends when this many of the nearest alive have answered; 1 to `k`.
    More finds fresher sequences and more publishers. A find that holds none always asks `k`."""

    request_seconds: float = 0.5
    """A silent peer of which nothing is known is passed over this long after it was asked, at the latest;
    over 0. A request is sent a second time after the usual round trip, half of this at the latest."""

    request_seconds_max: float = 3.0
    """The same for a peer that is known to be far or slow: up to twice its usual time, and no longer than
    this; at least `request_seconds`."""

    paths: int = 4
    """Disjoint paths of a lookup that matters (S/Kademlia); 1 or more. A liar can spoil only the path it is
    on, and each path costs about as many requests as a lookup of its own."""

    work_bits: int = 0
    """Proof of work that an id needs to be asked, met or answered (`work`), 0 for none to WORK_BITS_MAX. The
    same in the whole swarm."""

    late_seconds: float = 2.0
    """How long an answer is still welcome after that; 0 or more."""

    failures_max: int = 3
    """Requests in a row a contact may leave unanswered before it loses its place; 1 or more."""

    recheck_seconds: float = 5.0
    """How long after a failure the contact is pinged again; above `request_seconds`."""

    checks_max: int = 64
    """Pings in flight to contacts that are not yet, or no longer, trusted; 1 or more. A flood of
    strangers beyond this is answered but not met."""

    fresh_seconds: float = 60.0
    """A contact heard from within this time is not pinged to make room for another; 0 or more."""

    refresh_seconds: float = 600.0
    """A bucket in which nothing was looked up for so long is refreshed, give or take a quarter; above
    `refresh_gap_seconds`."""

    refresh_gap_seconds: float = 2.0
    """The least time between two refreshes, so that they do not come in a burst; above 0."""

    rejoin_seconds: float = 10.0
    """How long after a `join` that nobody answered, or after the table ran empty, the peers of the
    last `join` are asked again; above `request_seconds`."""

    republish_seconds: float = 1_800.0
    """How often a node stores its own records again, give or take a tenth; above 0. 30 minutes
    keeps 19 of 20 replicas alive at a median session of an hour."""

    republish_gap_seconds: float = 0.5
    """The least time between two records that a node stores again for others; above 0. Records of a publisher
    that is gone survive by it: the first holder that finds them overdue stores them again."""

    advert_seconds: float = 900.0
    """How long an advert stays valid; above `advert_renew_seconds`, for holders go as well."""

    advert_renew_seconds: float = 300.0
    """How often an advert is signed anew, up to a fifth sooner; above 0."""

    holders_min: int = 3
    """A store that reaches fewer has failed, unless the network or `k` is smaller; 1 or more."""

    handover_max: int = 64
    """Records handed to one newcomer, the nearest to it; 0 or more."""

    repairs_max: int = 2
    """Copies stored on the way of a find that met nodes without the record; 0 or more."""

    cache_seconds: float = 300.0
    """How long such a copy is kept by a node that is not near the key; 0 or more."""

    cache_max: int = 256
    """Such copies kept; 0 or more."""

    lost_max: int = 64
    """Contacts that fell silent and are tried again now and then, so that a network that was split grows
    together; 0 or more."""

    lost_retry_seconds: float = 60.0
    """Between two such tries; above 0."""

    lookup_requests_max: int = 128
    """Requests of one lookup; at least `k`. An honest one needs about `k` + 10."""

    lookup_seconds_max: float = 20.0
    """A lookup ends after this with what it has; above `request_seconds`. Only liars make it so long."""

    pages_max: int = 16
    """Pages of records asked of one holder in a find; 1 or more."""

    found_max: int = 256
    """Publishers collected by one find; 1 or more. Beyond it, new ones are passed over."""

    payload_bytes_max: int = 1_000
    """Size of a reply, encoded; PAYLOAD_BYTES_MIN to half of MESSAGE_BYTES_MAX. The default fits a
    datagram with its envelope. A reply always has room for one record, be it larger."""

    records_max: int = 10_000
    """Records this node holds for others and itself; 1 or more. About 1.5 kB each."""

    records_per_source_max: int = 2_000
    """How many of these may come from one address that is not local; 1 or more. A fifth: many nodes behind
    one translator store less with one node, and nobody fills it alone."""

    records_per_key_max: int = 64
    """Publishers under one key; 1 to `records_max`."""

    records_per_publisher_max: int = 256
    """Keys of one publisher; 1 to `records_max`."""

    expiry_check_seconds: float = 60.0
    """How often expired records are swept out; above 0. They are not handed out in between."""

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
