"""The routing table: contacts sorted into buckets by their keys (Kademlia sections 2.2, 2.4 and 4.1).

Built on `KBucket` of the `kademlia` package. The package's RoutingTable is not used, because it splits
buckets that a flood of ids chose, stops a search for the nearest contacts early, and needs asyncio. `Bucket`
changes `KBucket` in two points: the time is passed as an argument, and a split creates our own kind of
bucket.

The rules:
- The table holds only peers that answered us. Peers known by hearsay exist only in lookups until they answer.
- Only the bucket that holds our own key is split, so nobody can make us hold more than k contacts per
  doubling of the distance.
- The least recently heard contact of a bucket comes first. A newcomer to a full bucket waits in its
  replacement cache, and the first contact is pinged, because a contact that has been up for long is likely to
  stay up.
- An address group (`groups`) has at most `group_max` contacts in the table and BUCKET_GROUP_MAX in a bucket,
  as in go-libp2p. This holds only once k contacts of other groups are known, because a swarm within one
  network has only its own group. Until then, contacts of a crowding group make room for others in a full
  bucket, and rank behind others among the nearest.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from math import inf
from operator import attrgetter

from kademlia.node import Node
from kademlia.routing import KBucket

from crypto.identity import PeerId
from dht.groups import crowding_one, is_crowded, spread
from dht.keys import KEY_MAX, Key, node_key, node_number
from dht.messages import Hint

WAITING_MAX = 8
"""Maximum number of candidates that wait for a full bucket. Long-lived contacts stay, so only a few places an
hour become free, and each candidate costs memory and a ping."""
BUCKET_GROUP_MAX = 2
"""Number of contacts per address group that a full bucket keeps if other groups need the room, as in
go-libp2p."""


Trip = tuple[float, float]
"""Smoothed mean and deviation of a peer's round trips, in seconds."""


class Contact:
    """A peer with its key and its addresses; it is verified once it is in a Table.

    The package's structures use it as a Node, through `id`, `long_id` and `distance_to`. A real Node would
    take three times the memory, and each of thousands of simulated peers has hundreds of contacts.

    `watched`: another part of the node reports its death, so its silence is no reason for a ping. `silence`:
    None, or, if our latest request is unanswered, how many in a row are and when the newest of them timed
    out. `group`: its address group, None if it is never limited. `trip`: its usual answer time, once known.
    `token`: the write token from its latest answer; `answered`: the time of that answer.
    """

    __slots__ = (
        "addresses", "answered", "group", "heard", "long_id", "peer", "silence", "token", "trip", "watched"
    )  # fmt: skip

    def __init__(self, peer: PeerId, addresses: tuple[str, ...] = (), group: bytes | None = None) -> None:
        self.group = group
        self.long_id = node_number(peer)
        self.peer = peer
        self.addresses = addresses
        self.heard = -inf
        self.answered = -inf
        self.token = b""
        self.silence: tuple[int, float] | None = None
        self.trip: Trip | None = None
        self.watched = False

    @property
    def id(self) -> Key:
        return node_key(self.peer)

    def distance_to(self, node: Node) -> int:
        return self.long_id ^ int(node.long_id)

    @property
    def hint(self) -> Hint:
        """The hint that names this contact to other peers."""
        return Hint(self.peer, self.addresses)


_HEARD = attrgetter("heard")


class Bucket(KBucket):  # type: ignore[misc]  # the package has no type hints
    """A k-bucket that takes the time as an argument. `last_updated` is when a key in its range was last
    looked up, or when such a lookup was found unnecessary.

    The least recently heard contact is searched for on demand, by `heard`; among equals it is the one added
    first. To move a contact to the end at each of its messages would cost more time, and twice the memory of
    a dict that keeps its order.
    """

    nodes: dict[Key, Contact]
    replacement_nodes: dict[Key, Contact]
    range: tuple[int, int]

    def __init__(self, lower: int, upper: int, k: int, last_updated: float) -> None:
        self.last_updated = last_updated
        super().__init__(lower, upper, k)
        self.max_replacement_nodes = min(k, WAITING_MAX)
        self.nodes = {}
        self.replacement_nodes = {}

    def touch_last_updated(self, now: float | None = None) -> None:
        """Set `last_updated`. The package's constructor calls this without a time; then nothing changes."""
        if now is not None:
            self.last_updated = now

    def add_node(self, node: Contact) -> bool:
        """Add a node like the package does; at most k or WAITING_MAX nodes wait, whichever is less. If one
        group crowds a full bucket, a contact of that group makes room for a newcomer of another group."""
        key = node.id
        if key not in self.nodes and self.full and (crowding := self.crowding(node.group)) is not None:
            del self.nodes[crowding.id]
        if key in self.nodes or not self.full:
            self.replacement_nodes.pop(key, None)
            self.nodes[key] = node
            return True
        self.replacement_nodes[key] = node
        while len(self.replacement_nodes) > self.max_replacement_nodes:
            waiting = self.replacement_nodes.values()
            gone = crowding_one(waiting, None, BUCKET_GROUP_MAX) or min(waiting, key=_HEARD)
            del self.replacement_nodes[gone.id]
        return False

    def crowding(self, group: bytes | None) -> Contact | None:
        """Return a contact of a crowding group that should make room for a newcomer of `group`, if there is
        one."""
        return crowding_one(self.nodes.values(), group, BUCKET_GROUP_MAX)

    def wants_to_know(self, group: bytes | None) -> bool:
        """Return whether a newcomer of `group` would get a place in the full bucket or among the waiting
        contacts."""
        waiting = self.replacement_nodes.values()
        return self.crowding(group) is not None or crowding_one(waiting, group, BUCKET_GROUP_MAX) is not None

    def remove_node(self, node: Contact) -> None:
        """Remove a node like the package does. The most recently heard waiting contact replaces it,
        preferably one whose group is not in the bucket yet."""
        key = node.id
        self.replacement_nodes.pop(key, None)
        if self.nodes.pop(key, None) is not None and self.replacement_nodes:
            groups = {contact.group for contact in self.nodes.values()} - {None}
            waiting = list(reversed(self.replacement_nodes.values()))
            newest = max(waiting, key=lambda contact: (contact.group not in groups, contact.heard))
            self.nodes[newest.id] = self.replacement_nodes.pop(newest.id)

    def head(self) -> Contact:
        """Return the least recently heard contact."""
        return min(self.nodes.values(), key=_HEARD)

    def get_nodes(self) -> list[Contact]:
        """Return all contacts in the bucket, without the waiting ones, least recently heard first."""
        return sorted(self.nodes.values(), key=_HEARD)

    def split(self) -> tuple["Bucket", "Bucket"]:
        """Split into two halves; each takes as many waiting contacts as it has room for."""
        lower, upper = self.range
        middle = (lower + upper) // 2
        one = Bucket(lower, middle, self.ksize, self.last_updated)
        two = Bucket(middle + 1, upper, self.ksize, self.last_updated)
        for contact in (*self.nodes.values(), *self.replacement_nodes.values()):
            half = one if contact.long_id <= middle else two
            half.add_node(contact)
        return one, two

    def nearest_possible(self, target: int) -> int:
        """Return the least possible distance from `target` to a key in this range."""
        lower, upper = self.range
        return (lower ^ target) & ~(upper - lower)

    def find(self, key: Key) -> Contact | None:
        """Return the contact with this key, in the bucket or waiting."""
        return self.nodes.get(key) or self.replacement_nodes.get(key)

    @property
    def full(self) -> bool:
        return len(self.nodes) >= int(self.ksize)

    @property
    def replacements_full(self) -> bool:
        return len(self.replacement_nodes) >= int(self.max_replacement_nodes)


class Table:
    """The buckets of one node. Only messages from peers themselves, or missing answers, change it."""

    __slots__ = ("_ends", "_failures_max", "_group_max", "_has_groups", "_k", "_own", "_sizes", "buckets")

    def __init__(self, own: Key, *, k: int, failures_max: int, group_max: int = 3) -> None:
        self._group_max = group_max
        # Without any group, as in a local network, nothing needs to be counted.
        self._has_groups = False
        self._sizes: Counter[bytes | None] | None = None
        self._own = Node(own)
        self._k = k
        self._failures_max = failures_max
        self.buckets: list[Bucket] = [Bucket(0, KEY_MAX, k, -inf)]
        # The upper end of each bucket's range, for a binary search.
        self._ends = [KEY_MAX]

    def __len__(self) -> int:
        return sum(len(bucket) for bucket in self.buckets)

    def __iter__(self) -> Iterator[Contact]:
        """Iterate over all contacts except waiting ones, from the lowest bucket, least recently heard
        first."""
        for bucket in self.buckets:
            yield from bucket.get_nodes()

    def bucket_of(self, key: Key) -> Bucket:
        """Return the one bucket whose range holds `key`."""
        return self.buckets[bisect_left(self._ends, int.from_bytes(key, "big"))]

    def get(self, peer: PeerId) -> Contact | None:
        """Return a verified contact, in a bucket or waiting."""
        return self._bucket(peer).find(node_key(peer))

    def wants(self, peer: PeerId, *, waiting: bool = True, group: bytes | None = None) -> bool:
        """Return whether an unknown peer is worth a ping: it would get a place in the bucket or, with
        `waiting`, among the waiting contacts."""
        key = node_key(peer)
        if key == self._own.id:
            return False
        bucket = self._bucket(peer)
        if bucket.find(key) is not None or not self._admits(group, bucket):
            return False
        if not bucket.full or (waiting and not bucket.replacements_full):
            return True
        return bool(bucket.has_in_range(self._own)) or (self._has_groups and bucket.wants_to_know(group))

    def heard(self, now: float, peer: PeerId) -> Contact | None:
        """Record a request from a known contact, which becomes the most recently heard of its bucket.

        Only an answer ends its silence: a peer that sends requests but never answers is useless.
        """
        key = node_key(peer)
        bucket = self._bucket(peer)
        contact = bucket.find(key)
        if contact is not None and contact.silence is None:
            contact.heard = now
        return contact

    def answered(self, now: float, contact: Contact) -> Contact | None:
        """Record an answer of `contact`, which may add the contact to the table.

        If the contact has to wait for a place, return the contact to ping in its bucket, else None.
        """
        if contact.id == self._own.id:
            return None
        kept = self.get(contact.peer)
        is_new = kept is None or kept.group != contact.group
        if kept is None and not self._admits(contact.group, self._bucket(contact.peer)):
            return None
        kept = kept or contact
        kept.group = contact.group
        kept.trip = contact.trip or kept.trip
        self._has_groups = self._has_groups or kept.group is not None
        kept.heard = now
        kept.silence = None
        while not (bucket := self.bucket_of(kept.id)).add_node(kept):
            if not bucket.has_in_range(self._own):
                self._sizes = None if is_new else self._sizes
                return bucket.head()
            # The contact is now among the waiting ones, which the split distributes along with the others.
            index = self.buckets.index(bucket)
            self.buckets[index : index + 1] = bucket.split()
            self._ends.insert(index, self.buckets[index].range[1])
        if is_new:
            self._sizes = None
            if self._has_groups:
                self._trim(kept)
        return None

    def failed(self, now: float, peer: PeerId, asked: float) -> Contact | None:
        """Record that `peer` left a request unanswered that was sent at `asked`.

        Return the contact if the failure counts and the contact keeps its place. If it loses its place,
        return the contact that replaces it. Return None in all other cases. Several requests within one
        silence count once, because otherwise a short outage of our own would empty the table.
        """
        contact = self.get(peer)
        if contact is None:
            return None
        failures, since = contact.silence or (0, asked)
        if asked < since:
            return None
        contact.silence = (failures + 1, now)
        if failures + 1 < self._failures_max:
            return contact
        return self.remove(peer)

    def remove(self, peer: PeerId) -> Contact | None:
        """Remove a peer; return the waiting contact that replaces it."""
        key = node_key(peer)
        bucket = self._bucket(peer)
        contact = bucket.find(key)
        if contact is None:
            return None
        self._sizes = None
        before = len(bucket.replacement_nodes)
        was_inside = key in bucket.nodes
        bucket.remove_node(contact)
        is_replaced = was_inside and len(bucket.replacement_nodes) < before
        return next(reversed(bucket.nodes.values())) if is_replaced else None

    def nearest(
        self,
        key: Key,
        count: int,
        *,
        without: PeerId | None = None,
        failing: bool = False,
        waiting_since: float = inf,
    ) -> list[Contact]:
        """Return the `count` contacts nearest to `key` over all buckets, nearest first. The result is exact
        unless too many of them share an address group.

        Contacts that left our latest request unanswered are excluded unless `failing`, because they are
        probably dead. Waiting contacts are included if they have answered after `waiting_since`.
        """
        target = int.from_bytes(key, "big")
        wanted = count + (without is not None)
        found: list[tuple[int, Contact]] = []
        # The range of a bucket is an aligned power of two. So for any two buckets, all contacts of one are
        # nearer than any contact of the other. For so few contacts, sorting is faster than a heap.
        for bucket in sorted(self.buckets, key=lambda bucket: bucket.nearest_possible(target)):
            if len(found) >= wanted:
                break
            inside = [
                (contact.long_id ^ target, contact)
                for contact in bucket.nodes.values()
                if failing or contact.silence is None
            ]
            if waiting_since < inf:
                inside += [
                    (contact.long_id ^ target, contact)
                    for contact in bucket.replacement_nodes.values()
                    if contact.answered > waiting_since and contact.silence is None
                ]
            inside.sort()  # no two distances are equal
            found += inside
        nearest = [contact for _, contact in found[:wanted]]
        if self._has_groups and is_crowded(nearest, self._group_max):
            alive = [contact for contact in self if failing or contact.silence is None]
            alive.sort(key=lambda contact: contact.long_id ^ target)
            nearest = spread(alive, wanted, self._group_max)
        if without is not None:
            nearest = [contact for contact in nearest if contact.peer != without]
        return nearest[:count]

    def _admits(self, group: bytes | None, bucket: Bucket) -> bool:
        """Return whether this bucket accepts a newcomer of `group` at all."""
        if group is None or not self._has_groups:
            return True
        sizes = self._group_sizes
        of_group = sizes.get(group, 0)
        if of_group < BUCKET_GROUP_MAX or sizes.total() - of_group < self._k:
            return True
        inside = sum(contact.group == group for contact in bucket.nodes.values())
        return of_group < self._group_max and inside < BUCKET_GROUP_MAX

    def _trim(self, newcomer: Contact) -> None:
        """Drop contacts of an address group that exceeds its limit now that enough other groups are known."""
        sizes = self._group_sizes
        if max(sizes.values()) <= self._group_max and None not in sizes:
            return
        for group, size in list(sizes.items()):
            if group is not None and size > self._group_max and sizes.total() - size >= self._k:
                of_group = [contact for contact in self if contact.group == group and contact is not newcomer]
                # From the fullest bucket first, where most newcomers need the room.
                crowds = Counter(id(self._bucket(contact.peer)) for contact in of_group)
                of_group.sort(key=lambda contact: (-crowds[id(self._bucket(contact.peer))], contact.heard))
                self.remove(of_group[0].peer)

    @property
    def _group_sizes(self) -> Counter[bytes | None]:
        """The number of contacts of each group in the buckets, cached until they change."""
        if self._sizes is None:
            # A list, because counting the items of a generator takes twice as long.
            self._sizes = Counter(
                [contact.group for bucket in self.buckets for contact in bucket.nodes.values()]
            )
        return self._sizes

    def _bucket(self, peer: PeerId) -> Bucket:
        return self.buckets[bisect_left(self._ends, node_number(peer))]
