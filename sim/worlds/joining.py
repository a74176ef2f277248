"""How a simulated peer finds the first others: what `node.services.joining` does, on the agenda of a world.

It dials one peer that runs, chosen by the seed, and those that it remembers from an earlier life: sixteen at
once, each taking as long as a handshake. Whoever answers is joined through. While it is alone it tries again,
more and more slowly, and with another one that runs, as a person would.
"""

from collections.abc import Sequence
from heapq import heapify, heapreplace

from crypto.identity import PeerId
from dht.messages import PROTOCOL as KADEMLIA
from gossip.member import Status
from gossip.swim import PROTOCOL as SWIM
from node.services.joining import ATTEMPTS_MAX, RETRY_SECONDS_MAX, RETRY_SECONDS_MIN
from node.storage.remembered import REMEMBERED_MAX
from sim.network.instants import after, ticks
from sim.seams import HANDSHAKE_TRIPS
from sim.seeds import seeded_rng
from sim.worlds.life import Ground, Life

_LIVE = (Status.ALIVE, Status.SUSPECT)
_DRAWS_MAX = 8


class Joining:
    """For all peers of a world."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground

    def begin(self, life: Life, met_before: tuple[PeerId, ...]) -> None:
        """A life has begun."""
        self._dial(life, met_before, RETRY_SECONDS_MIN)

    def _dial(self, life: Life, met_before: tuple[PeerId, ...], pause_seconds: float) -> None:
        seed = self._seed_for(life)
        dialled = tuple(dict.fromkeys((*seed, *met_before)))
        # With nobody to ask it is the network itself.
        life.entered = life.entered or not dialled
        self._ground.at(
            self._end_of_dialling(life, dialled), self._dialled, life, dialled, met_before, pause_seconds
        )

    def _seed_for(self, life: Life) -> tuple[PeerId, ...]:
        rng = seeded_rng(self._ground.seed, "through", life.peer, ticks(self._ground.now))
        for _ in range(_DRAWS_MAX):
            through = self._ground.pick(rng)
            if through is not None and through is not life:
                return (through.peer,)
        return ()

    def _end_of_dialling(self, life: Life, dialled: Sequence[PeerId]) -> float:
        ends = [self._ground.now] * ATTEMPTS_MAX
        heapify(ends)
        for peer in dialled:
            latency_seconds = self._ground.latency_seconds(life.peer, peer)
            heapreplace(ends, after(ends[0], HANDSHAKE_TRIPS * latency_seconds))
        return max(ends)

    def _dialled(
        self, life: Life, dialled: tuple[PeerId, ...], met_before: tuple[PeerId, ...], pause_seconds: float
    ) -> None:
        ground = self._ground
        if ground.lives.get(life.peer) is not life or life.leaving:
            return
        answered = [peer for peer in dialled if ground.may_open(life.peer, peer)]
        if answered:
            ground.command(life, SWIM, lambda core, now: core.join(now, answered))
            ground.command(life, KADEMLIA, lambda core, now: core.join(now, answered))
        pause_after = min(RETRY_SECONDS_MAX, 2 * pause_seconds)
        ground.at(ground.now + pause_seconds, self._look, life, met_before, pause_after)

    def _look(self, life: Life, met_before: tuple[PeerId, ...], pause_seconds: float) -> None:
        ground = self._ground
        if ground.lives.get(life.peer) is not life or life.leaving:
            return
        if is_alone(life):
            self._dial(life, met_before, pause_seconds)
        else:
            ground.at(ground.now + RETRY_SECONDS_MAX, self._look, life, met_before, RETRY_SECONDS_MIN)


def is_alone(life: Life) -> bool:
    """Whether it lists nobody but itself as live."""
    live = 0
    for status in life.swim.statuses.values():
        live += status in _LIVE
        if live > 1:
            return False
    return True


def remembered(life: Life) -> tuple[PeerId, ...]:
    """Whom a node with this view writes down for its next life: the first of its live members."""
    others = sorted(
        peer for peer, status in life.swim.statuses.items() if status in _LIVE and peer != life.peer
    )
    return tuple(others[:REMEMBERED_MAX])
