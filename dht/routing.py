"""The routing table: contacts by their place in the key space (Kademlia sections 2.2, 2.4 and 4.1).

Built on `KBucket` of the `kademlia` package; its RoutingTable is left aside, because it
splits buckets that a flood of ids chose, stops a search for the nearest early and needs asyncio.
Mended here by subclass: time comes in as an argument, and a split keeps our own kind of bucket.

The rules:
- Only peers that answered us stand here; hearsay lives in lookups until then.
- Only the bucket that holds our own key is split, so that nobody can make us hold more than k contacts per
  doubling of the distance.
- In a bucket the least recently heard contact comes first. A newcomer to a full bucket waits in its
  replacement cache, and the first is pinged: a contact that has been up for long is likely to stay up.
- An address group (`groups`) has at most `group_max` contacts in the table and BUCKET_GROUP_MAX in a bucket,
  as in go-libp2p, once k contacts of other groups are known: a swarm within one network has only its own.
  Until then it makes room for others in a full bucket, and gives way among the nearest.
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
"""Candidates that wait for a place in a full bucket. Long-lived contacts stay, so places come free a few
times an hour; each candidate costs memory, and a ping to be known."""
BUCKET_GROUP_MAX = 2
"""Contacts of one address group that a full bucket keeps where others want their places, as in go-libp2p."""


Trip = tuple[float, float]
"""Smoothed mean and deviation of a peer's round trips, in seconds."""


class Contact:
    """A peer with its key, and where it may be reached; verified once it stands in a Table.

    To the package's structures it is a Node with `id`, `long_id` and `distance_to`; a Node itself would take
    three times the memory, and there are hundreds at each of thousands of simulated peers.

    `watched`: another part of the node reports its death, so its silence is no reason for a ping. `silence`,
    if our last request is unanswered: how many in a row, and when the last of them was given up. `group`: its
    address group, None if it counts alone. `trip`: its answer time, once known. `token`: the write token it
    gave last, and `answered`, when that was.
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
        """Return the hint that tells others of it."""
        return Hint(self.peer, self.addresses)


_HEARD = attrgetter("heard")


class Bucket(KBucket):  # type: ignore[misc]  # the package has no type hints
    """A k-bucket that takes the time as an argument. `last_updated` is when a key in its range was looked up,
    or there was no need to.

    The first contact is searched for on demand, by `heard`, among equals the one that came in first: moving a
    contact at each of its messages would cost more, and twice the memory of a dict that stays as it is.
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
        """The package calls this without a time from its constructor; then nothing changes."""
        if now is not None:
            self.last_updated = now

    def add_node(self, node: Contact) -> bool:
        """Add a node as the package does; at most k or WAITING_MAX wait for a place. A group that crowds a
        full bucket loses a contact to a newcomer of another group."""
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
        """Return the contact whose group crowds out a newcomer of `group`, if there is one."""
        return crowding_one(self.nodes.values(), group, BUCKET_GROUP_MAX)

    def wants_to_know(self, group: bytes | None) -> bool:
        """Return whether a newcomer of `group` would find a place, in the bucket or among those who wait."""
        waiting = self.replacement_nodes.values()
        return self.crowding(group) is not None or crowding_one(waiting, group, BUCKET_GROUP_MAX) is not None

    def remove_node(self, node: Contact) -> None:
        """Remove a node as the package does: the waiting contact heard of last takes its place, preferably
        one of another group than those in the bucket."""
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
        """Return all contacts that are not waiting, least recently heard first."""
        return sorted(self.nodes.values(), key=_HEARD)

    def split(self) -> tuple["Bucket", "Bucket"]:
        """Split into two halves; each takes as many replacements as it has room for."""
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
    """The buckets of one node. It changes only by what peers themselves sent us, or failed to."""

    __slots__ = ("_ends", "_failures_max", "_group_max", "_has_groups", "_k", "_own", "_sizes", "buckets")

    def __init__(self, own: Key, *, k: int, failures_max: int, group_max: int = 3) -> None:
        self._group_max = group_max
        # Without any group, as in a local network, nobody needs to be counted.
        self._has_groups = False
        self._sizes: Counter[bytes | None] | None = None
        self._own = Node(own)
        self._k = k
        self._failures_max = failures_max
        self.buckets: list[Bucket] = [Bucket(0, KEY_MAX, k, -inf)]
        # The upper end of each bucket's range, to find one fast.
        self._ends = [KEY_MAX]

    def __len__(self) -> int:
        return sum(len(bucket) for bucket in self.buckets)

    def __iter__(self) -> Iterator[Contact]:
        """All contacts but replacements, from the lowest bucket, least recently heard first."""
        for bucket in self.buckets:
            yield from bucket.get_nodes()

    def bucket_of(self, key: Key) -> Bucket:
        """Return the one bucket whose range holds `key`."""
        return self.buckets[bisect_left(self._ends, int.from_bytes(key, "big"))]

    def get(self, peer: PeerId) -> Contact | None:
        """Return a verified contact, in a bucket or waiting."""
        return self._bucket(peer).find(node_key(peer))

    def wants(self, peer: PeerId, *, waiting: bool = True, group: bytes | None = None) -> bool:
        """Return whether a stranger is worth a ping: there would be a place for it, or, if `waiting`, among
        those who wait for one."""
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
        """Record a request of a known contact: it is the most recently heard of its bucket.

        Only an answer ends its silence: a peer that asks and never answers is useless.
        """
        key = node_key(peer)
        bucket = self._bucket(peer)
        contact = bucket.find(key)
        if contact is not None and contact.silence is None:
            contact.heard = now
        return contact

    def answered(self, now: float, contact: Contact) -> Contact | None:
        """Record an answer of `contact`, which may thereby stand here.

        Return the contact to ping, if this one has to wait for another to fail, else None.
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
            # It waits among the replacements now, and the split deals those out with the rest.
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

        Return it if that counts and it still has its place; if not, return its replacement. Several requests
        within one silence count once, or a short outage of our own would empty the table.
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
        """Forget a peer; return the replacement that takes its place, the one added last."""
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
        """Return the `count` contacts nearest to `key`, nearest first: exactly these, over all buckets,
        unless too many of them are of one address group.

        Contacts that left our last request unanswered are passed over unless `failing`: nobody should be sent
        to the dead. Contacts that wait for a place count as well if they have answered after `waiting_since`.
        """
        target = int.from_bytes(key, "big")
        wanted = count + (without is not None)
        found: list[tuple[int, Contact]] = []
        # The range of a bucket is an aligned power of two: of two buckets, all of one are nearer than any of
        # the other. Sorting these few contacts is faster than making a heap.
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
        """Drop contacts of the newcomer's group beyond its limit, from before other groups were known."""
        sizes = self._group_sizes
        if max(sizes.values()) <= self._group_max and None not in sizes:
            return
        for group, size in list(sizes.items()):
            if group is not None and size > self._group_max and sizes.total() - size >= self._k:
                of_group = [contact for contact in self if contact.group == group and contact is not newcomer]
                # The fullest bucket first: there it stands in the way of most.
                crowds = Counter(id(self._bucket(contact.peer)) for contact in of_group)
                of_group.sort(key=lambda contact: (-crowds[id(self._bucket(contact.peer))], contact.heard))
                self.remove(of_group[0].peer)

    @property
    def _group_sizes(self) -> Counter[bytes | None]:
        """Return how many contacts of each group stand in buckets; counted anew only when they have
        changed."""
        if self._sizes is None:
            # From a list: to count what a generator yields takes twice as long.
            self._sizes = Counter(
                [contact.group for bucket in self.buckets for contact in bucket.nodes.values()]
            )
        return self._sizes

    def _bucket(self, peer: PeerId) -> Bucket:
        return self.buckets[bisect_left(self._ends, node_number(peer))]
