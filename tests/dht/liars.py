"""Kademlia cores that lie, for `tests.dht.table_world`: they send false neighbours or false values, or stay
silent.

Liars collude. Each knows all other liars, and answers a lookup with the liars nearest to its key. It
withholds the records that it was given, and hands out forged ones instead. In the simulation, signatures are
keyed hashes that any simulated peer could make. So a forged record here carries a wrong hash, as it would
carry a wrong signature with real keys.
"""

from collections.abc import Callable, Sequence
from random import Random

from crypto.contact import Address
from crypto.encoding import decode
from crypto.facts import Fact, Signer
from crypto.identity import PeerId
from dht.kademlia import Kademlia, Sends
from dht.keys import Key, node_number
from dht.messages import FindNode, FindValue, Hint, Message, Nodes, Store, Stored, Values
from dht.records import BODY_BYTES_MAX, RecordBody, sign_record
from dht.settings import KademliaSettings

NAMED = 8
"""Number of liars named in an answer: as many as an honest node could name."""


class FalseNeighbours(Kademlia):
    """A node that names the liars nearest to each key, and hands out no records."""

    liars: Sequence[PeerId] = ()

    def receive(self, now: float, sender: PeerId, message: Message) -> Sends:
        """Lie about everything except being alive."""
        sends = super().receive(now, sender, message)
        if isinstance(message, FindNode | FindValue | Store):
            return [(peer, self.lie(message, answer) if peer == sender else answer) for peer, answer in sends]
        return sends

    def lie(self, message: Message, answer: Message) -> Message:
        """Return the answer that is sent instead of the right one."""
        match answer:
            case Nodes():
                return Nodes(answer.id, answer.addresses, self.named(message), answer.token)
            case Values():
                return Values(answer.id, answer.addresses, (), False, self.named(message), answer.token)
            case Stored():
                return Stored(answer.id, answer.addresses, "", self.named(message), answer.token)
        return answer

    def named(self, message: Message) -> tuple[Hint, ...]:
        """Return the liars nearest to the target."""
        place = int.from_bytes(_key_of(message), "big")
        nearest = sorted(self.liars, key=lambda peer: node_number(peer) ^ place)[:NAMED]
        return tuple(Hint(peer, ()) for peer in nearest)


class FalseValues(FalseNeighbours):
    """A node that hands out a forged record for every key, and invented neighbours."""

    def named(self, message: Message) -> tuple[Hint, ...]:
        """Return peers that do not exist, arbitrarily near to the target."""
        del message
        return tuple(Hint(PeerId(self.rng.randbytes(32)), ()) for _ in range(NAMED))

    def lie(self, message: Message, answer: Message) -> Message:
        """Return a record under another peer's name if records are requested."""
        told = super().lie(message, answer)
        if isinstance(told, Values) and isinstance(message, FindValue):
            own = sign_record(self.signer, Key(message.key), b"forged", sequence=2**40, expires=2**40)
            forged = Fact(self.rng.randbytes(32), own.body, own.signature)
            return Values(told.id, told.addresses, (forged,), False, told.hints, told.token)
        return told


class Silent(FalseNeighbours):
    """A node that answers pings, so that it stays in tables, but answers nothing else."""

    def receive(self, now: float, sender: PeerId, message: Message) -> Sends:
        """Receive requests, and never answer lookups or stores."""
        sends = Kademlia.receive(self, now, sender, message)
        if isinstance(message, FindNode | FindValue | Store):
            return [(peer, answer) for peer, answer in sends if peer != sender]
        return sends


def _key_of(message: Message) -> bytes:
    """Return the key of a request, b"" if it has none."""
    if isinstance(message, Store):
        return decode(message.record.body, RecordBody, bytes_max=BODY_BYTES_MAX).key
    return message.key if isinstance(message, FindNode | FindValue) else b""


KINDS = (FalseNeighbours, FalseValues, Silent)


def liar_of(kinds: Sequence[type[FalseNeighbours]] = KINDS) -> Callable[..., Kademlia]:
    """Return a factory of liars that chooses their kind by id, in turn."""

    def make(
        signer: Signer, settings: KademliaSettings, rng: Random, addresses: tuple[Address, ...]
    ) -> Kademlia:
        kind = kinds[node_number(signer.peer) % len(kinds)]
        return kind(signer, settings, rng, addresses)

    return make
