"""Events of the DHT core for its shell: frozen, past tense."""

from dataclasses import dataclass

from crypto.contact import Address
from crypto.identity import PeerId
from dht.capabilities import CapabilityOffer
from dht.keys import Key
from dht.records import Record, Refusal


@dataclass(frozen=True)
class PeerHeard:
    """A peer was reported to be reachable at these addresses. This is a hint that the network may try."""

    peer: PeerId
    addresses: tuple[Address, ...]


@dataclass(frozen=True)
class Joined:
    """The lookup of our own key that `join` began has ended; `contacts` is 0 if nobody answered."""

    contacts: int


@dataclass(frozen=True)
class RecordsFound:
    """The end of a `find`, with the newest record of each publisher in the order of their ids. `rounds` is
    the length of the longest chain of hints followed; `holders` is the number of peers that handed out a
    record."""

    request: int
    key: Key
    records: tuple[Record, ...]
    rounds: int = 0
    holders: int = 0


@dataclass(frozen=True)
class NodesFound:
    """The end of a `locate`: the k nearest nodes that answered, nearest first, excluding this node."""

    request: int
    key: Key
    peers: tuple[PeerId, ...]


@dataclass(frozen=True)
class RecordStored:
    """The end of a `store`: `acknowledged` of the `tried` nodes (this one included) keep the record. If 0, no
    node has it; below `wanted`, it may get lost. `refusals` lists each reason given, once.
    """

    request: int
    acknowledged: int
    tried: int
    refusals: tuple[Refusal, ...] = ()
    rounds: int = 0
    wanted: int = 1

    @property
    def is_safe(self) -> bool:
        """Whether enough nodes keep the record."""
        return self.acknowledged >= self.wanted


@dataclass(frozen=True)
class PeerPinged:
    """The end of a `ping`: how long the answer took; None if none came in time."""

    request: int
    peer: PeerId
    seconds: float | None


@dataclass(frozen=True)
class CapabilitiesFound:
    """The end of a search by capability: the nodes that answered, nearest first."""

    request: int
    offers: tuple[CapabilityOffer, ...]


Event = PeerHeard | Joined | RecordsFound | NodesFound | RecordStored | PeerPinged | CapabilitiesFound
