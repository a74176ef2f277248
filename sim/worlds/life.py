"""One life of one simulated peer (from a start to the next stop), and the interface of a world of cores for
its parts.

A part of a world (the DHT records, a training run) receives the events that it subscribed to, sets timers,
and acts on the cores of peers as their local code would.
"""

from collections.abc import Callable, Mapping
from random import Random
from typing import Any, Protocol

from crypto.facts import Signer
from crypto.identity import PeerId
from sim.ports import Order
from sim.scenario import Scenario
from sim.worlds.factories import Cores, DiscoveryCore, MembershipCore


class Life:
    """A peer's life, from a start to the next stop; `serial` numbers its lives from 0.

    `since` is in virtual seconds of the world. `leaving`: the peer has said goodbye and is about to stop.
    `entered`: it has reached a peer in the DHT. `place` is its index in `RunningLives`. Its cores exist until
    the life is over.
    """

    __slots__ = (
        "entered", "kademlia", "leaving", "number", "peer", "place", "serial", "signer", "since", "swim"
    )  # fmt: skip

    def __init__(self, number: int, serial: int, since: float, signer: Signer) -> None:
        self.number = number
        self.serial = serial
        self.since = since
        self.signer = signer
        self.peer = signer.peer
        self.leaving = False
        self.entered = False
        self.place = -1
        self.swim: MembershipCore
        self.kademlia: DiscoveryCore


class RunningLives:
    """The running lives that are not about to leave, for random draws. Each has its index here as `place`."""

    def __init__(self) -> None:
        self._lives: list[Life] = []

    def add(self, life: Life) -> None:
        """Add a life that begins."""
        life.place = len(self._lives)
        self._lives.append(life)

    def remove(self, life: Life) -> None:
        """Remove a life; the last one in the list moves to its index."""
        last = self._lives.pop()
        if last is not life:
            self._lives[life.place] = last
            last.place = life.place

    def pick(self, rng: Random) -> Life | None:
        """Draw a life; None if no peer runs."""
        return self._lives[rng.randrange(len(self._lives))] if self._lives else None


class WorldEnvironment(Protocol):
    """A world of cores as seen by its parts. All times are virtual seconds of the world."""

    scenario: Scenario
    seed: int
    cores: Cores

    @property
    def now(self) -> float: ...

    @property
    def lives(self) -> Mapping[PeerId, Life]:
        """The current life of each running peer."""

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        """Call `action(*arguments)` at this instant, after all actions of cores at that instant."""

    def on(self, kind: type, handler: Callable[[Life, Any], None]) -> None:
        """Call `handler` with every event of exactly this type, and the life it belongs to, after the event
        was published. An event of a core is passed on before the messages that the core sends with it."""

    def tell(self, life: Life | None, event: Any) -> None:
        """Publish an event."""

    def command(self, life: Life, protocol: str, order: Order) -> None:
        """Let local code of the peer act on one of its cores immediately; do nothing if that life is over."""

    def pick(self, rng: Random) -> Life | None:
        """Return a running peer that is not about to leave."""

    def reaches(self, one: PeerId, other: PeerId) -> bool:
        """Return whether a message that `one` sends now may reach `other`."""
