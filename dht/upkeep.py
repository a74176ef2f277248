"""Upkeep of a routing table: refreshes, retries of lost contacts, and exclusion of liars.

A bucket in which nothing was looked up for long is refreshed by a lookup, and its silent contacts are pinged.
A contact that fell silent is tried again for about an hour, so that a network that was split can merge. A
peer whose answer no correct peer would send is neither asked nor pinged for a while.
"""

from collections.abc import Callable
from math import inf
from random import Random
from typing import Protocol

from crypto.identity import PeerId
from dht.keys import Key, random_key
from dht.requests import Search
from dht.routing import Bucket, Contact, Table
from dht.settings import KademliaSettings

WATCHED_PATIENCE = 4
"""Peers that SWIM already monitors are pinged this many times less often. Pings are still needed, because
a live peer may have become a client, or its DHT may have stopped. A bucket whose contacts are all
monitored is also refreshed this many times less often, since any further contact in its range would have
been named too."""
LOST_TRIES_MAX = 60
"""Maximum number of pings to a contact that fell silent; they are sent at most every `lost_retry_seconds`."""
LIARS_MAX = 256
"""Maximum number of peers remembered for a bad answer; the newest are kept."""
LIAR_SECONDS = 600.0
"""How long such a peer is neither asked nor pinged."""


class UpkeepCore(Protocol):
    """The parts of the core that `Upkeep` uses."""

    key: Key
    settings: KademliaSettings
    table: Table
    rng: Random

    def search(self, now: float, key: Key, then: Callable[[float, Search], None]) -> Search: ...


class Upkeep:
    """The part of a core that maintains its table. `check` pings a contact. Times are in monotonic
    seconds."""

    def __init__(self, ground: UpkeepCore, check: Callable[[float, Contact], None]) -> None:
        self._ground = ground
        self._check = check
        # Contacts that fell silent, the longest lost first, each with the number of tries since.
        self._lost: dict[PeerId, tuple[Contact, int]] = {}
        self._liars: dict[PeerId, float] = {}
        self._retry_due = inf
        self._refresh_due = inf

    @property
    def deadline(self) -> float:
        """When `wake` must be called."""
        return min(self._retry_due, self._refresh_due)

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """The size and limit of each table whose growth other peers can cause."""
        return {
            "lost contacts": (len(self._lost), self._ground.settings.lost_max),
            "liars": (len(self._liars), LIARS_MAX),
        }

    def wake(self, now: float) -> None:
        """Retry lost contacts and refresh buckets if it is time."""
        if self._retry_due <= now:
            self._retry_lost(now)
        if self._refresh_due <= now:
            self._refresh(now)

    # Liars.

    def distrust(self, now: float, peer: PeerId) -> None:
        """Remove a peer whose answer no correct peer would send."""
        self._ground.table.remove(peer)
        self._liars.pop(peer, None)
        self._liars[peer] = now + LIAR_SECONDS
        while len(self._liars) > LIARS_MAX:
            del self._liars[next(iter(self._liars))]

    def is_liar(self, now: float, peer: PeerId) -> bool:
        """Return whether a peer recently sent such an answer."""
        return self._liars.get(peer, -inf) > now

    # Lost contacts.

    def found(self, peer: PeerId) -> None:
        """Forget a lost contact that has answered."""
        self._lost.pop(peer, None)

    def lose(self, now: float, contact: Contact | None) -> None:
        """Schedule occasional retries of a contact that fell silent, because the network may be split."""
        if contact is None or not self._ground.settings.lost_max:
            return
        self._lost.pop(contact.peer, None)
        lost = Contact(contact.peer, contact.addresses, contact.group)
        self._lost[contact.peer] = (lost, 0)
        while len(self._lost) > self._ground.settings.lost_max:
            del self._lost[next(iter(self._lost))]
        self._retry_due = min(self._retry_due, now + self._retry_pause())

    def _retry_pause(self) -> float:
        return self._ground.settings.lost_retry_seconds * self._ground.rng.uniform(0.5, 1.5)

    def _retry_lost(self, now: float) -> None:
        """Ping the contact whose loss or latest try is longest ago."""
        self._retry_due = inf
        if not self._lost:
            return
        peer = next(iter(self._lost))
        contact, tries = self._lost.pop(peer)
        if self._ground.table.wants(peer, waiting=False, group=contact.group):
            self._check(now, contact)
        if tries + 1 < LOST_TRIES_MAX:
            self._lost[peer] = (contact, tries + 1)
        self._retry_due = now + self._retry_pause() if self._lost else inf

    # Refreshes.

    def begin(self, now: float) -> None:
        """Begin to refresh buckets, now that a peer has answered."""
        if self._refresh_due == inf:
            self._refresh_due = now + self._ground.settings.refresh_seconds

    def refresh_all(self, now: float) -> None:
        """Refresh the far buckets one after the other, because a lookup of our own key does not reach
        them."""
        table = self._ground.table
        for bucket in table.buckets:
            if bucket is not table.bucket_of(self._ground.key):
                bucket.touch_last_updated(-inf)
        self._refresh_due = now + self._ground.settings.refresh_gap_seconds

    def touch(self, now: float, bucket: Bucket) -> None:
        """Record that a key in the bucket was looked up, or that a lookup was unnecessary."""
        # The time varies by a quarter, so that buckets filled together are not refreshed together for ever.
        spread = self._ground.rng.uniform(-0.25, 0.25)
        bucket.touch_last_updated(now + self._ground.settings.refresh_seconds * spread)

    def _refresh(self, now: float) -> None:
        """Refresh the bucket whose latest lookup is longest ago, if it is time, and ping its contacts that
        were silent for that long."""
        settings = self._ground.settings
        stalest = self._stalest()
        if stalest.last_updated + settings.refresh_seconds <= now:
            for contact in stalest.get_nodes():
                patience = WATCHED_PATIENCE if contact.watched else 1
                if contact.heard + patience * settings.refresh_seconds <= now:
                    self._check(now, contact)
            if self._is_worth_a_lookup(stalest):
                self._ground.search(
                    now, random_key(self._ground.rng, *stalest.range), lambda _now, _search: None
                )
            else:
                self.touch(now, stalest)
        due = self._stalest().last_updated + settings.refresh_seconds
        self._refresh_due = max(due, now + settings.refresh_gap_seconds)

    def _is_worth_a_lookup(self, bucket: Bucket) -> bool:
        if bucket.full and bucket is not self._ground.table.bucket_of(self._ground.key):
            return False  # there is no room for more contacts until one is lost
        if not bucket.nodes or not all(contact.watched for contact in bucket.nodes.values()):
            return True
        # A random choice gives the same average rate, and no bucket has to remember a time.
        return self._ground.rng.random() * WATCHED_PATIENCE < 1

    def _stalest(self) -> Bucket:
        return min(self._ground.table.buckets, key=lambda bucket: bucket.last_updated)
