"""The bootstrap of a simulated peer: the rules of `node.services.bootstrap`, on the agenda of a world.

A peer dials one running peer, chosen by the seed, and those that it remembers from before a restart: sixteen
at a time, each taking as long as a handshake. It joins through each peer that answers. While alone it
retries, at growing intervals and through different running peers, as a user would.
"""

from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import Literal, Protocol

from crypto.identity import PeerId
from dht.messages import PROTOCOL as KADEMLIA
from gossip.member import Status
from gossip.swim import PROTOCOL as SWIM
from node.services.bootstrap import ATTEMPTS_MAX, RETRY_SECONDS_MAX, RETRY_SECONDS_MIN
from node.storage.known_peers import REMEMBERED_MAX
from node.transport.handshake import CONNECT_SECONDS
from sim.network.instants import after, ticks
from sim.network.links import SimLinks
from sim.peer_network import HANDSHAKE_TRIPS
from sim.seeds import seeded_rng
from sim.worlds.life import Life, WorldEnvironment

_LIVE = (Status.ALIVE, Status.SUSPECT)
_DRAWS_MAX = 8


Answer = Literal["ok", "refused", "timeout"]


class DialGround(WorldEnvironment, Protocol):
    """A world where peers dial each other."""

    links: SimLinks


class WorldBootstrap:
    """The bootstrap of all peers of a world."""

    def __init__(self, ground: DialGround) -> None:
        self._ground = ground

    def begin(self, life: Life, met_before: tuple[PeerId, ...]) -> None:
        """Begin to dial for a peer that has just started."""
        self._dial(life, met_before, RETRY_SECONDS_MIN)

    def watch(self, life: Life) -> None:
        """Watch a new peer that already knows others; it dials if it is alone."""
        self._ground.at(self._ground.now + RETRY_SECONDS_MAX, self._look, life, (), RETRY_SECONDS_MIN)

    def _dial(self, life: Life, met_before: tuple[PeerId, ...], pause_seconds: float) -> None:
        seed = first_to_dial(self._ground, life)
        dialled = tuple(dict.fromkeys((*(() if seed is None else (seed.peer,)), *met_before)))
        # If there is no other peer, this one is itself the network.
        life.entered = life.entered or not dialled
        due = self._end_of_dialling(life, dialled)
        self._ground.at(due, self._dialled, life, dialled, met_before, self._ground.now, pause_seconds)

    def _end_of_dialling(self, life: Life, dialled: Sequence[PeerId]) -> float:
        ends = [self._ground.now] * ATTEMPTS_MAX
        heapify(ends)
        for peer in dialled:
            links = self._ground.links
            there, back = links.latency_seconds(life.peer, peer), links.latency_seconds(peer, life.peer)
            heapreplace(ends, after(ends[0], HANDSHAKE_TRIPS / 2 * (there + back)))
        return max(ends)

    def _dialled(
        self,
        life: Life,
        dialled: tuple[PeerId, ...],
        met_before: tuple[PeerId, ...],
        begun: float,
        pause_seconds: float,
    ) -> None:
        """Handle the end of all handshakes. Those without an answer are given up later."""
        answers = {peer: handshake(self._ground, life.peer, peer) for peer in dialled}
        found = [peer for peer, answer in answers.items() if answer == "ok"]
        waves = -(-sum(answer == "timeout" for answer in answers.values()) // ATTEMPTS_MAX)
        due = max(self._ground.now, begun + waves * CONNECT_SECONDS)
        self._ground.at(due, self._tried, life, found, met_before, pause_seconds)

    def _tried(
        self, life: Life, found: list[PeerId], met_before: tuple[PeerId, ...], pause_seconds: float
    ) -> None:
        ground = self._ground
        if ground.lives.get(life.peer) is not life or life.leaving:
            return
        if found:
            ground.command(life, SWIM, lambda core, now: core.join(now, found))
            ground.command(life, KADEMLIA, lambda core, now: core.join(now, found))
        pause_after = min(RETRY_SECONDS_MAX, 2 * pause_seconds)
        ground.at(ground.now + pause_seconds, self._look, life, met_before, pause_after)

    def _look(self, life: Life, met_before: tuple[PeerId, ...], pause_seconds: float) -> None:
        ground = self._ground
        if ground.lives.get(life.peer) is not life or life.leaving:
            return
        if life.swim.live <= 1:  # the peer knows no other live peer
            self._dial(life, met_before, pause_seconds)
        else:
            ground.at(ground.now + RETRY_SECONDS_MAX, self._look, life, met_before, RETRY_SECONDS_MIN)


def first_to_dial(ground: DialGround, life: Life) -> Life | None:
    """Return a running peer, chosen by the seed; None if there is none.

    A peer that is already in the swarm is preferred even if it is unreachable at the moment, because users
    pass on addresses of such peers. Two lone peers that dialled each other would form a separate swarm
    forever.
    """
    rng = seeded_rng(ground.seed, "through", life.peer, ticks(ground.now))
    best: Life | None = None
    rank = (False, False)
    for _ in range(_DRAWS_MAX):
        through = ground.pick(rng)
        if through is None or through is life:
            continue
        found = (through.entered, handshake(ground, life.peer, through.peer) == "ok")
        if best is None or found > rank:
            best, rank = through, found
        if all(rank):
            return best
    if best is not None and not best.entered:
        # The draws found only newcomers; a search in the order of starting soon finds a peer in the swarm.
        known = (other for other in ground.lives.values() if other.entered and not other.leaving)
        best = next((other for other in known if other is not life), best)
    return best


def handshake(ground: DialGround, one: PeerId, other: PeerId) -> Answer:
    """Return the outcome of a handshake that ends now. refused: no process runs there; timeout: no answer
    came."""
    links = ground.links
    meet = links.reaches(one, other) and links.reaches(other, one)
    if not meet or not links.may_open(other, ground.now):
        return "timeout"
    return "ok" if other in ground.lives else "refused"


def remembered(life: Life) -> tuple[PeerId, ...]:
    """Return the peers that a node with this view saves for its next start: the first of its live members."""
    return tuple(sorted(live_others(life))[:REMEMBERED_MAX])


def live_others(life: Life) -> list[PeerId]:
    """Return the other peers that it lists as live."""
    return [peer for peer, status in life.swim.statuses.items() if status in _LIVE and peer != life.peer]
