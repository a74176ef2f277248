"""One life of one simulated peer, and what a part of a world of cores may do there.

A part (the records' work, a training run) is told of the events it asked for, sets alarms, and acts on the
cores of peers as their local code would.
"""

from collections.abc import Callable, Mapping
from random import Random
from typing import Any, Protocol

from crypto.facts import Signer
from crypto.identity import PeerId
from sim.engine import Order
from sim.scenario import Scenario
from sim.worlds.factories import Cores, DiscoveryCore, MembershipCore


class Life:
    """From a start of a peer to the stop that follows it; `serial` counts the lives of that peer from 0.

    `since` is in virtual seconds of the world. `leaving`: it has said goodbye and is about to end. `entered`:
    it has found somebody in the DHT. `place` is the world's own. Its cores are there until it is over.
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


class Ground(Protocol):
    """A world of cores as its parts see it. All times are virtual seconds of the world."""

    scenario: Scenario
    seed: int
    cores: Cores

    @property
    def now(self) -> float: ...

    @property
    def lives(self) -> Mapping[PeerId, Life]:
        """The present life of each peer that runs."""

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        """Call `action(*arguments)` at this instant, after all that the cores do there."""

    def on(self, kind: type, handler: Callable[[Life, Any], None]) -> None:
        """Call `handler` with every event of exactly this type, after it was published, and the life that
        it came up in. Events of cores are told before what the core sends is on its way."""

    def tell(self, life: Life | None, event: Any) -> None:
        """Publish an event."""

    def command(self, life: Life, protocol: str, order: Order) -> None:
        """Let local code of the peer act on a core of its, at once; nothing if that life is over."""

    def pick(self, rng: Random) -> Life | None:
        """A peer that runs and is not about to leave."""

    def reaches(self, one: PeerId, other: PeerId) -> bool:
        """Return whether what `one` sends now may arrive at `other`."""
