"""`/peerloom/life/1`: two nodes with one key tell each other their lives (a life is one start of a process,
by its time and a random number).

A copied data folder makes two nodes with one identity. Usually members reveal the two to each other by their
facts (`gossip`). This protocol covers a join through the other node itself, which no other node has met yet.
A node dials its own id at an address; if the life there is its own, the address is its own too. The node
whose life began later stops.

Not here: the consequences (`node.services.membership`).
"""

import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
import trio

from crypto.contact import ADDRESSES_MAX, PLACE_LENGTH_MAX, Address, parse_addresses
from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from gossip.messages import LIFE_BYTES, Incarnation
from node.containment import contain
from node.errors import StreamClosed, Unreachable, UsageError
from node.events import IdentityShared
from node.paths import short_path
from node.protocols.calls import conversation
from node.seams import Network, Stream, StreamLimits
from node.storage.folder import IDENTITY_NAME
from node.storage.keys import STATIC_NAME

PROTOCOL = "/peerloom/life/1"
MESSAGE_BYTES_MAX = 2_048
ASK_SECONDS = 5.0
ADDRESSES_LOOKED_MAX = 4
"""Number of addresses tried, the first ones of a life, which announces at most eight."""
LOOK_PAUSES_SECONDS = (1.0, 2.0, 4.0)
"""Pauses before further checks of an address that does not answer: a busy machine may have failed one dial.
Usually nobody answers, because the address belonged to an earlier life of this node."""
SERVED_MAX = 2
"""Maximum number of simultaneous streams of one peer. Only a node with this node's own key has a reason to
ask."""

OWN_KEYS = (IDENTITY_NAME, STATIC_NAME)
STARTED_FORMAT = "%Y-%m-%d %H:%M:%S UTC"

STREAMS = StreamLimits(MESSAGE_BYTES_MAX, SERVED_MAX)

Found = Callable[[bytes, int, Sequence[Address]], None]
"""Called when another life is found, with that life, its incarnation, and its claimed addresses."""


def shared_error(shared: IdentityShared, folder: Path, own: Sequence[str]) -> UsageError:
    """Return the error with which the younger of two nodes with one identity ends. `own` are its
    addresses."""
    there = " or ".join((*shared.addresses, *([shared.name] if shared.name else [])))
    started = time.strftime(STARTED_FORMAT, time.gmtime(shared.started))
    here, remove = short_path(folder), shlex.join(["rm", *(str(folder / name) for name in OWN_KEYS)])
    return UsageError(
        f"another node has this node's identity. It has been running since {started} at"
        f" {there or 'an unknown address'}."
        f" This node, at {' or '.join(own)} from {here}, began later and stops",
        f"if {here} is a copy, give it its own identity: {remove}. Or start this node with --data-dir DIR",
    )


class LifeName(msgspec.Struct, frozen=True, array_like=True):
    """The sender's life of its key, its incarnation, and its addresses."""

    life: Annotated[bytes, msgspec.Meta(min_length=LIFE_BYTES, max_length=LIFE_BYTES)]
    incarnation: Incarnation
    addresses: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=PLACE_LENGTH_MAX)], ...],
        msgspec.Meta(max_length=ADDRESSES_MAX),
    ]


class Lives:
    """Tells other nodes this node's `life`, and asks for theirs. `found` is called for each other life that
    is met in either way."""

    def __init__(self, network: Network, life: bytes, incarnation: Callable[[], int], found: Found) -> None:
        self._network = network
        self._life = life
        self._incarnation = incarnation
        self._found = found
        self._is_looking = False
        network.handle(PROTOCOL, self._serve, STREAMS)

    async def is_other(self, at: Address | None = None) -> bool:
        """Return whether an answer under this node's own id came from a different node."""
        try:
            async with conversation(
                self._network,
                self._network.peer,
                PROTOCOL,
                seconds=ASK_SECONDS,
                message_bytes_max=MESSAGE_BYTES_MAX,
                at=at,
            ) as stream:
                await stream.send(self._name())
                return self._met(await stream.receive())
        except (Unreachable, StreamClosed, RemoteProtocolError):
            return False

    async def look(self, addresses: Sequence[Address]) -> None:
        """Look for another life of this node's identity at these addresses, which an earlier life used. All
        are tried concurrently, a few times."""
        with contain("looking for another life"):
            for pause_seconds in (*LOOK_PAUSES_SECONDS, 0.0):
                if await self._look_once(addresses[:ADDRESSES_LOOKED_MAX]):
                    return
                await trio.sleep(pause_seconds)

    async def _look_once(self, addresses: Sequence[Address]) -> bool:
        """Return whether another life answers at one of these addresses."""
        found: list[Address] = []
        async with trio.open_nursery() as nursery:

            async def look_at(address: Address) -> None:
                with suppress(Unreachable):
                    await self._network.identify(address.of(self._network.peer))
                    if await self.is_other(address):
                        found.append(address)
                        nursery.cancel_scope.cancel()

            for address in addresses:
                nursery.start_soon(look_at, address)
        return bool(found)

    async def look_near(self, addresses: Sequence[Address]) -> None:
        """Check the addresses in a beacon. Anybody on the link may send a beacon, so only addresses that a
        peer may claim are dialled, and not during another check."""
        admitted = [address for address in addresses if self._network.admits(address)]
        if admitted and not self._is_looking:
            self._is_looking = True
            try:
                await self._look_once(admitted[:ADDRESSES_LOOKED_MAX])
            finally:
                self._is_looking = False

    async def _serve(self, stream: Stream) -> None:
        with trio.move_on_after(ASK_SECONDS):
            message = await stream.receive()
            await stream.send(self._name())
            if stream.peer == self._network.peer:
                self._met(message)

    def _name(self) -> bytes:
        # Leave out circuits: a version without relays would refuse an answer that contains one.
        own = [address.of(None) for address in self._network.addresses if address.relay is None]
        texts = [text for text in map(str, own) if len(text) <= PLACE_LENGTH_MAX]
        return encode(LifeName(self._life, self._incarnation(), tuple(texts[:ADDRESSES_MAX])))

    def _met(self, message: bytes) -> bool:
        """Return whether the peer is another life. Raises RemoteProtocolError."""
        other: LifeName = decode(message, LifeName, bytes_max=MESSAGE_BYTES_MAX)
        if other.life == self._life:
            return False
        self._found(other.life, other.incarnation, parse_addresses(other.addresses, self._network.peer))
        return True
