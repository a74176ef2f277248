"""A warm start, for scenarios that ask for it: the peers know each other from the first instant, as in a
swarm that has run for long.

To play a swarm's start is costly, and it answers a different question: every peer passes on each of n facts,
which takes minutes of virtual time, and all first refreshes of the DHT coincide. Instead each peer receives
the messages that would have taught it the outcome, so a user's own cores learn it as well. Its membership
core gets the facts of all peers that it should list. Its DHT core gets contacts, drawn uniformly for each
bucket and its replacement cache, as if it had exchanged pings with them within one refresh interval. The
cores' replies are not sent. No message carries the depth of a scope, so it is set directly.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from crypto.errors import LocalProtocolError
from crypto.facts import Fact
from crypto.identity import PeerId
from dht import messages as dht
from dht.keys import KEY_BITS, node_number
from dht.messages import PROTOCOL as KADEMLIA
from dht.routing import WAITING_MAX
from dht.settings import KademliaSettings as Discovery
from gossip import messages as swim
from gossip.settings import SwimSettings as Membership
from gossip.swim import PROTOCOL as SWIM
from node.services.driver import Sends
from sim.network.links import SimLinks
from sim.seeds import seeded_rng
from sim.worlds.life import Life, WorldEnvironment
from sim.worlds.roster import WorldRoster


class Acquaintance:
    """Makes the running peers known to each other."""

    def __init__(
        self,
        ground: WorldEnvironment,
        links: SimLinks,
        roster: WorldRoster,
        membership: Membership,
        discovery: Discovery,
        *,
        scoped: bool,
    ) -> None:
        self._ground = ground
        self._links = links
        self._membership = membership
        self._discovery = discovery
        self._scoped = scoped
        # In the order of the key space, since neighbourhoods and buckets are ranges of it.
        self._lives = sorted(ground.lives.values(), key=lambda life: node_number(life.peer))
        self._numbers = [node_number(life.peer) for life in self._lives]
        self._texts = [dht.address_texts((roster.address(life.number),)) for life in self._lives]

    def make(self) -> None:
        """Exchange all facts and contacts at this instant."""
        facts = [self._own_fact(life) for life in self._lives]
        for place, life in enumerate(self._lives):
            self._meet(life, place)
            self._list(life, place, facts)
            life.entered = True

    # The member list

    def _own_fact(self, life: Life) -> Fact:
        """Return a peer's fact about itself, as the peer sends it on request."""
        heard: list[Fact] = []
        stranger = PeerId(bytes(len(life.peer)))

        def ask(core: Any, now: float) -> Sends:
            question = swim.ScopedSync(True, None, ()) if self._scoped else swim.Sync(True, ())
            for _, answer in core.receive(now, stranger, question):
                heard.extend(fact for fact in getattr(answer, "facts", ()) if fact.author == life.peer)
            return []

        self._ground.command(life, SWIM, ask)
        if not heard:
            raise LocalProtocolError(
                "start.acquainted: the membership core did not answer a Sync with its own fact"
            )
        return heard[0]

    def _list(self, life: Life, place: int, facts: Sequence[Fact]) -> None:
        depth, first, end = self._neighbourhood(place)
        if end - first < 2:
            return
        teller = self._lives[first if first != place else first + 1].peer
        told = tuple(facts[first:end])
        everything = swim.ScopedSync(False, depth, told) if self._scoped else swim.Sync(False, told)

        def learn(core: Any, now: float) -> Sends:
            if self._scoped:
                core.scope.depth = depth
            if hasattr(core, "acquaint"):
                core.acquaint(now, teller, told)  # without this, it would first ping each of them
            else:
                core.receive(now, teller, everything)
            return []

        self._ground.command(life, SWIM, learn)

    def _neighbourhood(self, place: int) -> tuple[int, int, int]:
        """Return the depth of a peer's scope, and the range of the peers that it lists."""
        depth, first, end = 0, 0, len(self._lives)
        if self._scoped:
            while end - first > self._membership.scope_members_max:
                depth += 1
                first, end = self._range(self._numbers[place], depth)
        return depth, first, end

    # The routing table

    def _meet(self, life: Life, place: int) -> None:
        own, count = self._numbers[place], self._discovery.k + WAITING_MAX
        rng = seeded_rng(self._ground.seed, "acquaintance", life.peer)
        ago_seconds = rng.random() * self._discovery.refresh_seconds
        for depth in range(KEY_BITS):
            first, end = self._range(own ^ 1 << KEY_BITS - 1 - depth, depth + 1)
            near = range(first, end)
            self._know(life, rng.sample(near, min(count, len(near))), ago_seconds)
            first, end = self._range(own, depth + 1)
            if end - first <= 1:  # the range contains only this peer
                break

    def _know(self, life: Life, places: Sequence[int], ago_seconds: float) -> None:
        def meet(core: Any, now: float) -> Sends:
            then = now - ago_seconds
            for place in places:
                other, texts = self._lives[place], self._texts[place]
                seconds = self._links.latency_seconds(life.peer, other.peer)
                seconds += self._links.latency_seconds(other.peer, life.peer)
                for _, question in core.receive(then - seconds, other.peer, dht.Ping(other.number, texts)):
                    if isinstance(question, dht.Ping):
                        core.receive(then, other.peer, dht.Pong(question.id, texts))
            return []

        self._ground.command(life, KADEMLIA, meet)

    def _range(self, number: int, depth: int) -> tuple[int, int]:
        """Return the range of peers whose keys share the first `depth` bits with `number`."""
        free = KEY_BITS - depth
        low = number >> free << free
        return bisect_left(self._numbers, low), bisect_left(self._numbers, low + (1 << free))
