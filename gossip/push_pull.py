"""Joining, and the comparison and exchange of whole member lists: memberlist's push-pull.

News travels by gossip; this exchange is for peers without a list, and for the time after a partition. Each
sync period, a digest of our list goes to one member, which answers with its list if its own digest differs.
In swarms that are divided into neighbourhoods (`gossip.view`), only members that both peers list are compared
and sent, and scopes are widened or narrowed here. A newcomer whose seed is outside its neighbourhood is told
so. In that case, and whenever we may lack neighbours, `NeighbourhoodLookupWanted` asks for a search.

Not here: the meaning of facts (`gossip.state_table`), probes and the gossip timer (`gossip.swim`).
"""

from collections.abc import Sequence
from random import Random

from crypto.errors import RemoteProtocolError
from crypto.facts import Fact
from crypto.identity import PeerId
from gossip.member import Event, NeighbourhoodLookupWanted
from gossip.messages import DIGESTS_MAX, ByStream, Compare, Gossip, Message, ScopedCompare, ScopedSync, Sync
from gossip.other_lives import AGAIN_LISTENERS_MAX
from gossip.settings import SwimSettings
from gossip.state_table import MembershipState
from gossip.view import KeyRegion, Scope

ASKED_MAX = 16
"""Maximum number of unknown peers that are asked for their facts per probe interval. More may be a flood, and
honest peers ping again."""
SERVED_MAX = 64
"""Maximum number of peers answered with a Sync per probe interval: a Sync may be a megabyte, and a join needs
only one."""
SEEDS_MAX = 16
"""Maximum number of peers that one join tries."""
NEIGHBOURS_ASKED = 2
"""Number of seeds asked simultaneously if the swarm is divided into neighbourhoods, because all would send
the same."""
JOIN_RETRY_INTERVALS = 5
"""Number of probe intervals before an unanswered join is retried, doubled each time."""
SEARCH_SYNCS_MIN = 2
SEARCH_SYNCS_MAX = 16
"""Maximum number of sync periods between two searches for neighbours when none are known to be missing. The
interval doubles after each search without a result, because hundreds of other peers search too and pass on
what they find."""

Sends = list[tuple[PeerId, Message | ByStream]]


class Exchange:
    """One peer's exchange of lists; `due` is the time of the next `sync`."""

    __slots__ = (
        "_asked", "_beliefs", "_events", "_fitted", "_rested_at", "_retry_seconds", "_right_depth",
        "_right_for", "_rng", "_scope",
        "_search_syncs", "_searched", "_seeds", "_served", "_settings", "_syncs", "_table", "due"
    )  # fmt: skip

    def __init__(
        self,
        beliefs: MembershipState,
        scope: Scope,
        settings: SwimSettings,
        rng: Random,
        events: list[Event],
        due: float,
    ) -> None:
        self._rng = rng
        self.due = due
        self._beliefs = beliefs
        self._table = beliefs.table
        self._scope = scope
        self._settings = settings
        self._events = events
        self._seeds: tuple[PeerId, ...] = ()
        self._retry_seconds = 0.0
        # In the current probe interval: unknown peers that were asked, and peers that were answered with a
        # list.
        self._asked: list[PeerId] = []
        self._served: list[PeerId] = []
        self._searched = False
        self._syncs = 0
        self._search_syncs = SEARCH_SYNCS_MIN
        # The scope grows one step at a time, so that its new half is known before the scope is judged again.
        self._rested_at = due
        self._fitted = 0
        # The latest correct depth, and the digest of the list for which it was correct.
        self._right_depth, self._right_for = 0, b""

    def join(self, now: float, peers: Sequence[PeerId]) -> Sends:
        """Exchange lists with `peers`. Retry, at growing intervals, until one of them answers."""
        seeds = [peer for peer in peers if peer != self._beliefs.peer]
        if not self._scope.whole:
            seeds = [peer for peer in seeds if not self._table.is_live(peer)]
            if not seeds:
                return []
            if any(map(self._scope.holds, seeds)):
                self._search_syncs = SEARCH_SYNCS_MIN
            self._scope.joining = self._table.live == 1
        self._seeds = tuple(seeds[:SEEDS_MAX])
        self._retry_seconds = JOIN_RETRY_INTERVALS * self._settings.probe_interval_seconds
        self.due = min(self.due, now + self._retry_seconds)
        return list(self._ask_seeds())

    def greet(self, sender: PeerId) -> Sends:
        """Ask an unknown peer for its facts. Send a peer that we list as gone all our facts about it, so that
        it refutes them."""
        if self._table.is_live(sender) or sender in self._asked or len(self._asked) >= ASKED_MAX:
            return []
        if not (self._scope.joining or self._scope.holds(sender)):
            return []
        self._asked.append(sender)
        known = sender in self._table.rows
        facts: tuple[Fact, ...] = self._table.facts() if known else self._beliefs.me.facts
        return [(sender, self._list(True, facts))]

    def receive_compare(self, sender: PeerId, message: Compare | ScopedCompare) -> Sends:
        """Answer with our list if the digests differ."""
        if isinstance(message, Compare):
            if not self._table.is_live(sender):
                return self.greet(sender)
            digest, region = message.digest, None
        else:
            region = self._scope.common(sender, message.depth)
            deeper = max(self._scope.depth - message.depth, 0)
            if region is None or self._scope.joining or deeper >= len(message.digests):
                return []
            if self._scope.holds(sender) and not self._table.is_live(sender):
                return self.greet(sender)
            digest = message.digests[deeper]
        if digest == self._digest(region) or not self._may_serve(sender):
            return []
        return [(sender, self._list(True, self._facts(region)))]

    def check_scope(self, message: Sync | ScopedSync | Compare | ScopedCompare) -> None:
        """Raise RemoteProtocolError if a message belongs to a swarm with a different kind of scope."""
        if isinstance(message, Sync | Compare) != self._scope.whole:
            kind = "of everybody" if self._scope.whole else "of neighbourhoods"
            raise RemoteProtocolError(f"{type(message).__name__} in a swarm {kind}")

    def receive_sync(self, now: float, sender: PeerId, message: Sync | ScopedSync) -> Sends:
        """Process a list, and answer with the facts that the sender lacks."""
        region = None
        # A newcomer knows at most the sender, and its first list is no news to the swarm.
        known = len(self._table.rows) - 1 - (sender in self._table.rows)
        if isinstance(message, ScopedSync):
            if self._scope.joining and not self._settle(sender, message):
                return []
            region = self._region(sender, message.depth)
            if region is None:
                outside = message.reply_wanted and self._may_serve(sender)
                return [(sender, self._list(False, ()))] if outside else []
            half = self._scope.around(sender, self._scope.depth + 1)
            known = len(half.among(self._table.rows)) - 1
        passed_on = known > 0 or message.reply_wanted
        self._beliefs.learn(now, sender, message.facts, synced=True, passed_on=passed_on)
        if sender in self._seeds and not message.reply_wanted:
            self._seeds = ()
        sends: Sends = []
        if message.reply_wanted and self._may_serve(sender):
            told = {fact.signature for fact in message.facts}
            news = tuple(fact for fact in self._facts(region) if fact.signature not in told)
            sends.append((sender, self._list(False, news + self._beliefs.displaced.of(sender))))
        return sends

    def sync(self, now: float) -> Sends:
        """Compare lists with one live member."""
        self._beliefs.forget_gone(now)
        period = self._settings.sync_period_seconds(self._table.live)
        if self._seeds:
            period = self._retry_seconds = min(2 * self._retry_seconds, period)
        # Vary the period by up to a quarter, because peers that started together must not sync simultaneously
        # forever.
        self.due = now + period * self._rng.uniform(0.75, 1.25)
        live = self._table.pick(1, lambda row: row.live)
        sends: Sends = [(peer, self._comparison(peer)) for peer in live]
        if not self._scope.whole:
            self._syncs += 1
            digest = self._table.digest()
            is_known = self._right_depth == self._scope.depth and self._right_for == digest
            if not is_known and self._fit(now):
                self._right_depth, self._right_for = self._scope.depth, digest
            if self._scope.joining:
                self._search(self._scope.own_key())
            elif self._scope.lopsided(self._table.live_peers()):
                # The peers nearest to us may not list the peers that we miss in the other half of our scope,
                # so they cannot name them.
                self._search(self._scope.key_beyond())
            elif self._syncs >= self._search_syncs:
                # All the peers that we know may lack the same member that we lack.
                self._syncs = 0
                if self._table.live >= self._settings.scope_members_min:
                    self._search_syncs = min(2 * self._search_syncs, SEARCH_SYNCS_MAX)
                self._search(self._scope.random_key(self._rng))
        # Datagrams may not reach a seed that did not answer.
        return sends + [(peer, ByStream(asked)) for peer, asked in self._ask_seeds()]

    def announce_again(self, now: float) -> Sends:
        """Announce immediately that this life replaces another one that others may still list. Few peers pass
        on news of a member that changes often."""
        self._beliefs.lives.announce_again(now)
        news = Gossip((self._beliefs.me.said.fact,))
        return [(peer, news) for peer in self._table.pick(AGAIN_LISTENERS_MAX, lambda row: row.live)]

    def next_interval(self, now: float) -> None:
        """Begin a probe interval."""
        if self._asked or self._served:
            self._asked.clear()
            self._served.clear()
        self._searched = False
        if self._scope.lonely(self._table.live):
            self._fit(now)

    def narrow_if_crowded(self, now: float) -> None:
        """Narrow the scope if it has too many members. Call this whenever members may have been added."""
        if self._scope.crowded(self._table.live) and self._table.live != self._fitted:
            self._fit(now)

    # Helpers

    def _list(self, reply_wanted: bool, facts: tuple[Fact, ...]) -> Sync | ScopedSync:
        if self._scope.whole:
            return Sync(reply_wanted, facts)
        return ScopedSync(reply_wanted, None if self._scope.joining else self._scope.depth, facts)

    def _comparison(self, peer: PeerId) -> Compare | ScopedCompare:
        if self._scope.whole:
            return Compare(self._table.digest())
        depth = self._scope.depth
        digests, inside = [self._table.digest()], list(self._table.rows)
        for deeper in range(1, DIGESTS_MAX):
            inside = self._scope.around(peer, depth + deeper).among(inside)
            digests.append(self._table.digest(inside))
        return ScopedCompare(depth, tuple(digests))

    def _facts(self, region: KeyRegion | None) -> tuple[Fact, ...]:
        return self._table.facts(self._inside(region))

    def _digest(self, region: KeyRegion | None) -> bytes:
        return self._table.digest(self._inside(region))

    def _inside(self, region: KeyRegion | None) -> list[PeerId] | None:
        # All listed members are in our own scope.
        if region is None or region.depth <= self._scope.depth:
            return None
        return region.among(self._table.rows)

    def _may_serve(self, sender: PeerId) -> bool:
        if sender in self._served or len(self._served) >= SERVED_MAX:
            return False
        self._served.append(sender)
        return True

    def _ask_seeds(self) -> list[tuple[PeerId, Message]]:
        count = SEEDS_MAX if self._scope.whole else NEIGHBOURS_ASKED
        asked = self._seeds[:count]
        self._seeds = self._seeds[count:] + asked
        return [(peer, self._list(True, self._table.facts())) for peer in asked]

    # Only in swarms that are divided into neighbourhoods

    def _settle(self, sender: PeerId, message: ScopedSync) -> bool:
        """Adopt the neighbourhood of `sender` if it is also ours, and we have none yet."""
        if message.depth is None:
            # The sender wants to join through us, and we have found no peer ourselves: a swarm begins with
            # two such peers.
            self._scope.joining = not message.reply_wanted
        elif self._scope.held_by(sender, message.depth):
            self._scope.depth = message.depth
            self._scope.joining = False
        else:
            self._search(self._scope.own_key())
        return not self._scope.joining

    def _region(self, sender: PeerId, depth: int | None) -> KeyRegion | None:
        """Return the region whose members to send to `sender`; `depth` is that of its scope, or None."""
        if depth is not None:
            return self._scope.common(sender, depth)
        return self._scope.around(sender, self._scope.depth) if self._scope.holds(sender) else None

    def _search(self, key: bytes) -> None:
        if not self._searched:
            self._searched = True
            self._events.append(NeighbourhoodLookupWanted(key))

    def _fit(self, now: float) -> bool:
        """Widen or narrow the scope if that is due. Return whether the scope was already correct."""
        depth = self._scope.fit(self._table.live_peers())
        is_right = depth == self._scope.depth
        if not is_right:
            self._search_syncs = SEARCH_SYNCS_MIN
        if depth > self._scope.depth:
            self._scope.depth = depth
            self._beliefs.forget_outside()
        elif depth < self._scope.depth and self._rested_at <= now:
            self._rested_at = now + self._settings.sync_interval_seconds
            self._scope.depth = depth
            self._searched = False
            self._search(self._scope.key_beyond())
        self._fitted = self._table.live
        return is_right
