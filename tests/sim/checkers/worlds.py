"""A minimal world for tests of checkers, whose state is set by hand."""

from collections.abc import Mapping, Sequence
from typing import Any

from crypto.identity import PeerId
from gossip.member import Status
from sim.checkers.checker import Checker
from sim.events import PeerStarted, PeerStopped
from sim.observers import Observation
from sim.scenario import Checks, Scenario
from sim.seeds import seeded_peer

PEERS = tuple(seeded_peer(1, number) for number in range(12))
N0, N1, N2, N3 = PEERS[:4]


def a_scenario(**values: Any) -> Scenario:
    return Scenario(
        name="t",
        about="t",
        nodes=len(PEERS),
        checks=Checks(converge_seconds=100.0, found_share=0.9),
        **values,
    )


class Stage:
    """A rig in which one checker watches a hand-made event stream."""

    def __init__(self, checker: Checker, peers: int = 4) -> None:
        self.now = 0.0
        self.checker = checker
        self.up: dict[PeerId, float] = {}
        self.views: dict[PeerId, dict[PeerId, Status]] = {}
        self.away: tuple[PeerId, ...] = ()
        self.foreign: tuple[PeerId, ...] = ()
        self.held: dict[PeerId, dict[str, tuple[int, int]]] = {}
        for peer in PEERS[:peers]:
            self.start(peer)
        for peer in PEERS[:peers]:
            self.views[peer] = dict.fromkeys(PEERS[:peers], Status.ALIVE)

    def tell(self, peer: PeerId | None, event: Any) -> None:
        self.checker.see(Observation(self.now, peer, event), self)

    def start(self, peer: PeerId) -> None:
        self.up[peer] = self.now
        self.views.setdefault(peer, {})
        self.tell(peer, PeerStarted("", False))

    def stop(self, peer: PeerId) -> None:
        del self.up[peer]
        self.tell(peer, PeerStopped("crash"))

    def wait(self, seconds: float) -> None:
        """Let time pass, with a sample each second."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            self.checker.sample(self)

    # Same as in `sim.observers.World`.

    @property
    def peers(self) -> Sequence[PeerId]:
        return PEERS

    def name(self, peer: PeerId) -> str:
        return f"n{PEERS.index(peer)}"

    def is_up(self, peer: PeerId) -> bool:
        return peer in self.up

    def up_since(self, peer: PeerId) -> float:
        return self.up[peer]

    def region(self, peer: PeerId) -> str:
        return ""

    def reaches(self, one: PeerId, other: PeerId) -> bool:
        return (one in self.away) == (other in self.away)

    def in_scope(self, one: PeerId, other: PeerId) -> bool:
        return other not in self.foreign

    def believes(self, peer: PeerId) -> Mapping[PeerId, Status]:
        return self.views[peer]

    def sizes(self, peer: PeerId) -> Mapping[str, tuple[int, int]]:
        return self.held.get(peer, {})

    def counters(self) -> Mapping[str, int]:
        return {}
