"""The constructors of a world's cores, which a user may replace.

A replacement is called like the product's own constructor. The core that it returns needs only the methods of
every core and those named here; a subclass of the product's core has them all.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from crypto.contact import Address
from crypto.facts import Fact, Signer
from crypto.identity import PeerId
from dht import settings as dht
from dht.kademlia import Kademlia
from dht.keys import Key
from gossip import settings as gossip
from gossip.member import Profile, Status
from gossip.swim import Swim
from gossip.view import Place, Scope
from node.services.driver import Core
from partition.plan.paxos import PaxosChain
from partition.run.parts import Parts
from partition.steps.committer import Committer
from partition.steps.replica import Replica


class MembershipCore(Core, Protocol):
    """The interface of a membership core in a world. It emits the events of `gossip.member`."""

    wall_offset: float | None

    @property
    def scope(self) -> Scope: ...
    @property
    def statuses(self) -> Mapping[PeerId, Status]: ...
    @property
    def live(self) -> int: ...
    @property
    def sizes(self) -> Mapping[str, tuple[int, int]]: ...

    def join(self, now: float, peers: Sequence[PeerId]) -> Any: ...
    def leave(self, now: float) -> Any: ...


class DiscoveryCore(Core, Protocol):
    """The interface of a record core in a world. It emits the events of `dht.events`."""

    wall_offset: float

    @property
    def sizes(self) -> Mapping[str, tuple[int, int]]: ...

    def appear(self, addresses: Sequence[Address], *, client: bool) -> None: ...
    def join(self, now: float, peers: Sequence[PeerId]) -> Any: ...
    def add(self, now: float, peer: PeerId, addresses: Sequence[Address]) -> Any: ...
    def remove(self, now: float, peer: PeerId) -> Any: ...
    def unwatch(self, peer: PeerId) -> None: ...
    def locate(self, now: float, key: Key) -> tuple[int, Any]: ...
    def find(self, now: float, key: Key) -> tuple[int, Any]: ...
    def store(self, now: float, fact: Fact) -> tuple[int, Any]: ...


class MakeMembership(Protocol):
    """Makes a membership core. If the peer lists only its neighbourhood, `place` is its position in the key
    space."""

    def __call__(
        self,
        signer: Signer,
        profile: Profile,
        settings: gossip.SwimSettings,
        rng: Random,
        incarnation: int,
        now: float,
        *,
        place: Place | None = None,
    ) -> MembershipCore: ...


MakeDiscovery = Callable[[Signer, dht.KademliaSettings, Random, tuple[Address, ...]], DiscoveryCore]


@dataclass(frozen=True)
class Cores:
    """One constructor for each kind of core."""

    swim: MakeMembership = Swim
    kademlia: MakeDiscovery = Kademlia
    replica: Callable[..., Any] = Replica
    committer: Callable[..., Any] = Committer
    agreement: Callable[..., Any] = PaxosChain
    member: Parts = Parts()  # noqa: RUF009 - frozen
