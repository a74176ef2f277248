"""A hand-made world: a test produces the events, watchers receive them, and simple code keeps the lists."""

from collections.abc import Mapping, Sequence
from typing import Any

from crypto.identity import PeerId
from gossip.member import MemberDown, MemberForgotten, MemberLeft, MemberSuspected, MemberUp, Status
from sim.events import NetworkHealed, NetworkSplit, PeerStarted, PeerStopped
from sim.observers import Observation, Watcher
from sim.seeds import seeded_peer


class MadeWorld:
    """An implementation of `sim.observers.World`. `happen` publishes an event and updates the state
    accordingly.
    """

    def __init__(self, nodes: int, *watchers: Watcher) -> None:
        self.now = 0.0
        self.peers: Sequence[PeerId] = [seeded_peer(1, number) for number in range(nodes)]
        self.lists: dict[PeerId, dict[PeerId, Status]] = {}
        self.since: dict[PeerId, float] = {}
        self.sides: tuple[tuple[PeerId, ...], ...] = ()
        self.count: dict[str, int] = {}
        self.scopes: dict[PeerId, set[PeerId]] | None = None
        self.remembered: dict[PeerId, dict[PeerId, Status]] = {}
        self.watchers = watchers

    def happen(self, at: float, peer: int | None, event: Any) -> None:
        self.now = at
        subject = self.peers[peer] if peer is not None else None
        self._do(subject, event)
        for watcher in self.watchers:
            watcher.see(Observation(at, subject, event), self)

    def sample(self, at: float) -> None:
        self.now = at
        for watcher in self.watchers:
            watcher.sample(self)

    def start(self, at: float, peer: int, region: str = "") -> None:
        self.happen(at, peer, PeerStarted(region, remembers=False))

    def crash(self, at: float, peer: int, why: str = "crash") -> None:
        self.happen(at, peer, PeerStopped(why))

    def meet(self, at: float, observer: int, subject: int) -> None:
        who = self.peers[subject]
        self.happen(at, observer, MemberUp(who, self.name(who), (), b"", 1, self.peers[0]))

    def suspect(self, at: float, observer: int, subject: int, accuser: int | None = None) -> None:
        by = self.peers[observer if accuser is None else accuser]
        self.happen(at, observer, MemberSuspected(self.peers[subject], by, "no ack"))

    def bury(self, at: float, observer: int, subject: int, accuser: int | None = None) -> None:
        by = self.peers[observer if accuser is None else accuser]
        self.happen(at, observer, MemberDown(self.peers[subject], by, "no ack"))

    def _do(self, subject: PeerId | None, event: Any) -> None:
        match event:
            case PeerStarted() if subject is not None:
                self.lists[subject] = dict(self.remembered.get(subject, {}))
                self.since[subject] = self.now
            case PeerStopped() if subject is not None:
                self.lists.pop(subject, None)
            case MemberUp(peer=peer) if subject is not None:
                self.lists[subject][peer] = Status.ALIVE
            case MemberSuspected(peer=peer) if subject is not None:
                self.lists[subject][peer] = Status.SUSPECT
            case MemberDown(peer=peer) if subject is not None:
                self.lists[subject][peer] = Status.DEAD
            case MemberLeft(peer=peer) if subject is not None:
                self.lists[subject][peer] = Status.LEFT
            case MemberForgotten(peer=peer) if subject is not None:
                self.lists[subject].pop(peer, None)
            case NetworkSplit(sides=sides):
                self.sides = sides
            case NetworkHealed():
                self.sides = ()

    def name(self, peer: PeerId) -> str:
        return f"n{self.peers.index(peer)}"

    def is_up(self, peer: PeerId) -> bool:
        return peer in self.lists

    def up_since(self, peer: PeerId) -> float:
        return self.since[peer]

    def region(self, peer: PeerId) -> str:
        return ""

    def reaches(self, one: PeerId, other: PeerId) -> bool:
        return self._side(one) == self._side(other)

    def _side(self, peer: PeerId) -> int:
        return next((number for number, side in enumerate(self.sides) if peer in side), -1)

    def in_scope(self, one: PeerId, other: PeerId) -> bool:
        return self.scopes is None or other in self.scopes[one]

    def believes(self, peer: PeerId) -> Mapping[PeerId, Status]:
        return self.lists[peer]

    def sizes(self, peer: PeerId) -> Mapping[str, tuple[int, int]]:
        return {}

    def counters(self) -> Mapping[str, int]:
        return self.count
