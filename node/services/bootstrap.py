"""Finds the first peer. Every address is tried separately and gets its own reason for failure, and no failure
is fatal.

Seeds and remembered peers are tried concurrently. While this node is alone they are tried again at growing
intervals; once a peer is known, SWIM and the DHT find the rest. A peer whose beacon is heard is tried
immediately, unless it is a member already. So two swarms of one name that began separately become one.
"""

from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence

import trio

from crypto.contact import Address
from crypto.identity import PeerId
from node.errors import Unreachable
from node.events import JoinTried
from node.seams import Clock, Network
from node.transport.racing import race

RETRY_SECONDS_MIN = 2.0
RETRY_SECONDS_MAX = 60.0
ATTEMPTS_MAX = 32
"""Maximum number of peers dialled simultaneously, each at a few of its addresses."""
HEARD_MAX = 64
"""Maximum number of peers heard on the local network that wait to be dialled. A peer that is left out is
heard again."""
HEARD_ADDRESSES_MAX = 3
"""Maximum number of addresses tried for one such peer, because nothing about it is proved."""
BEACON, MEMORY = "beacon", "memory"
"""How an address was found that no user gave: see `node.events.JoinTried`."""


class Bootstrap:
    """Tries `addresses` until a peer answers; `found` is called for every peer that does. Addresses that are
    grouped belong to one peer, and the first one that answers suffices."""

    def __init__(
        self,
        network: Network,
        clock: Clock,
        addresses: Sequence[Sequence[Address]],
        *,
        publish: Callable[[JoinTried], None],
        found: Callable[[Sequence[PeerId]], None],
        is_alone: Callable[[], bool],
        is_member: Callable[[PeerId], bool],
        counters: Counter[str],
        is_other: Callable[[], Awaitable[bool]],
        is_remembered: Callable[[Sequence[Address]], bool] = lambda _: False,
    ) -> None:
        """`is_other` returns whether an answer under this node's own id came from a different node."""
        self._is_other = is_other
        self._is_remembered = is_remembered
        self._network = network
        self._clock = clock
        self._addresses = tuple(tuple(each) for each in addresses)
        self._publish = publish
        self._found = found
        self._is_alone = is_alone
        self._is_member = is_member
        self._counters = counters
        self._heard: OrderedDict[PeerId, tuple[Address, ...]] = OrderedDict()
        self._stirred = trio.Event()

    def add(self, address: Address) -> None:
        """Also try this address from the next round on."""
        if (address,) not in self._addresses:
            self._addresses = (*self._addresses, (address,))

    async def run(self) -> None:
        """Run until cancelled: one round immediately, and more while this node is alone."""
        pause = RETRY_SECONDS_MIN
        while self._addresses:
            await self.try_all()
            await trio.sleep(pause)
            pause = min(RETRY_SECONDS_MAX, pause * 2)
            while not self._is_alone():
                pause = RETRY_SECONDS_MIN
                await trio.sleep(RETRY_SECONDS_MAX)

    def hear(self, peer: PeerId, addresses: Sequence[Address]) -> None:
        """Take the beacon of a nearby peer."""
        if self._is_member(peer) or (peer not in self._heard and len(self._heard) >= HEARD_MAX):
            return
        admitted = [address.of(peer) for address in addresses if self._network.admits(address)]
        if admitted:
            self._heard[peer] = tuple(admitted[:HEARD_ADDRESSES_MAX])
            self._stirred.set()

    async def try_heard(self) -> None:
        """Dial the peers of beacons one after the other, until cancelled."""
        while True:
            while self._heard:
                peer, addresses = self._heard.popitem(last=False)
                if self._is_member(peer):
                    continue  # the peer has become known by other means
                if await self._try(addresses, found_by=BEACON) is not None:
                    self._found([peer])
            self._stirred = trio.Event()
            await self._stirred.wait()

    async def try_all(self) -> list[PeerId]:
        """Dial every address once, and report each peer as it answers, without waiting for dead addresses.

        Return the peers that answered, in the order of the addresses.
        """
        answers: dict[int, PeerId] = {}
        free = trio.Semaphore(ATTEMPTS_MAX)

        async def attempt(index: int, addresses: Sequence[Address]) -> None:
            try:
                found_by = MEMORY if self._is_remembered(addresses) else ""
                peer = await self._try(addresses, found_by=found_by)
            finally:
                free.release()
            if peer is not None:
                answers[index] = peer
                self._found([peer])

        async with trio.open_nursery() as nursery:
            # Keep the order: addresses given by the user come before remembered ones.
            for index, addresses in enumerate(self._addresses):
                await free.acquire()
                nursery.start_soon(attempt, index, addresses)
        return list(dict.fromkeys(answers[index] for index in sorted(answers)))

    async def try_one(self, address: Address) -> JoinTried:
        """Dial an address once; report and return the outcome. If the address led to this node itself, the
        outcome's peer is None."""
        return await self._dial((address,), "")

    async def _try(self, addresses: Sequence[Address], *, found_by: str = "") -> PeerId | None:
        return (await self._dial(addresses, found_by)).peer

    async def _dial(self, addresses: Sequence[Address], found_by: str) -> JoinTried:
        """Dial one peer at its addresses; return the outcome."""
        begun = self._clock.monotonic()
        address, peer, outcome, detail = addresses[0], None, "ok", ""
        others = [each for each in addresses if not self._network.is_own(each)]
        try:
            if others:
                address = others[0]
                address, peer = (await race(others, self._identify))[0]
        except Unreachable as error:
            outcome, detail = error.reason, error.detail
        if not others:
            outcome, detail = "self", "this is this node's own address"
        elif peer == self._network.peer:
            peer, outcome, detail = None, "self", "this is this node's own address"
            if await self._is_other():
                outcome, detail = (
                    "same key",
                    "another node has this node's identity; was the data folder copied?",
                )
        elif peer is not None:
            self._network.learn(peer, [address.of(peer)])
        tried = JoinTried(
            at=self._clock.wall(),
            address=address.short,
            outcome=outcome,
            detail=detail,
            peer=peer,
            seconds=self._clock.monotonic() - begun,
            found_by=found_by,
        )
        if found_by == BEACON and outcome not in ("ok", "work"):
            # An unknown peer's beacon is not reported until a peer of this swarm answers there.
            self._counters["beacons_led_nowhere"] += 1
        else:
            self._publish(tried)
        return tried

    async def _identify(self, address: Address) -> tuple[Address, PeerId]:
        return address, await self._network.identify(address)
