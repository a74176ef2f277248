"""`/peerloom/reach/1`: dial-back requests, and echoes of datagrams.

When asked over a stream, a peer dials the asker at the named ports, but only at the stream's own source host,
so that it cannot be used against others. It reports the outcome of each dial, and the asker's outer address.
Datagrams under the same protocol name are echoed, so that a path can be measured. `ReachService` asks and
answers; `autonat_core` decides which peers to ask and what follows.
"""

from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection
from random import Random
from typing import Annotated

import msgspec
import trio

from crypto.contact import PLACE_LENGTH_MAX, PORT_MAX, Address, make_address, parse_address
from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.errors import StreamClosed, Unreachable
from node.protocols.calls import conversation
from node.seams import Clock, Network, Stream
from node.services.autonat_core import (
    ADDRESSES_MAX,
    FAMILY_OTHERS,
    REACH,
    DialReport,
    FamilyVerdicts,
    Reachability,
    ReachSettings,
    count_networks,
)
from node.transport.address_policy import is_global

PROTOCOL = "/peerloom/reach/1"
MESSAGE_BYTES_MAX = 1_536
DIAL_SECONDS = 5.0
"""Time limit for one port; the asker waits meanwhile."""
ASK_SECONDS = 30.0
"""Time limit for the stream, its handshake and all ports."""
SERVED_MAX = 4
"""Maximum number of askers served simultaneously. Each may cost five seconds of waiting, and a handshake."""
PAUSE_SECONDS = 60.0
"""Least time between two requests of one peer that are served."""
HOST_SERVED_MAX = 8
"""Maximum number of peers of one host served within that time. Several nodes may be on the host, or behind
it."""
SERVED_KEPT_MAX = 256
"""Maximum number of requests of all hosts served within that time."""
REASONS = ("", "refused", "timeout", "unknown", "wrong key")
ECHO_BYTES_MAX = 1_232
ECHOES_PER_SECOND_MAX = 100
"""Maximum number of echoes per second for all askers together. An echo is as long as its request, so it does
not amplify."""


class DialBack(msgspec.Struct, frozen=True, array_like=True):
    """A request to dial the sender at these ports of its stream's source host."""

    ports: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=1, le=PORT_MAX)], ...], msgspec.Meta(max_length=ADDRESSES_MAX)
    ]


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of one dial. `reason` is empty if the asker answered, else "refused", "timeout" or "wrong
    key"."""

    port: Annotated[int, msgspec.Meta(ge=1, le=PORT_MAX)]
    reason: Annotated[str, msgspec.Meta(max_length=16)]


class Dialled(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of each dial, and the host that was dialled. Without outcomes, the peer did not try."""

    host: Annotated[str, msgspec.Meta(max_length=PLACE_LENGTH_MAX)]
    outcomes: Annotated[tuple[Outcome, ...], msgspec.Meta(max_length=ADDRESSES_MAX)]


class Echo(msgspec.Struct, frozen=True, array_like=True):
    """A datagram to be sent back if it `asks`, else the echo itself."""

    asks: bool
    number: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    filling: Annotated[bytes, msgspec.Meta(max_length=ECHO_BYTES_MAX)] = b""


async def ask_dial_back(
    network: Network, clock: Clock, peer: PeerId, at: Address | None = None
) -> DialReport:
    """Ask `peer` to dial this node back. If `at` is given, the request goes to that address, and so uses its
    IP version.

    Raises:
        Unreachable, StreamClosed: the peer could not be asked. RemoteProtocolError: the answer is malformed.
    """
    own = [address for address in network.addresses if address.relay is None]
    ports = tuple(dict.fromkeys(address.port for address in own))[:ADDRESSES_MAX]
    async with conversation(network, peer, PROTOCOL, seconds=ASK_SECONDS, at=at) as stream:
        await stream.send(encode(DialBack(ports)))
        dialled: Dialled = decode(await stream.receive(), Dialled, bytes_max=MESSAGE_BYTES_MAX)
        there = stream.source
    if any(each.port not in ports for each in dialled.outcomes):
        raise RemoteProtocolError("the peer dialled a port that it was not asked to dial")
    return DialReport(clock.monotonic(), there, _outcomes(dialled))


def _outcomes(dialled: Dialled) -> tuple[tuple[Address, str], ...]:
    """Return the outcome of each dialled address. Raises RemoteProtocolError for a malformed host, or a
    reason that must not be shown."""
    found = []
    for each in dialled.outcomes:
        try:
            address = parse_address(str(make_address(dialled.host, each.port)))
        except ValueError:
            raise RemoteProtocolError("a malformed host") from None
        if address.kind not in ("ip4", "ip6") or each.reason not in REASONS:
            raise RemoteProtocolError("a malformed outcome")
        found.append((address, each.reason))
    return tuple(found)


def family_of(address: Address) -> int | None:
    """Return the IP version of an address, 4 or 6, but 6 only for a global address; None for others."""
    if address.kind == "ip4":
        return 4
    return 6 if address.kind == "ip6" and is_global(address.host) else None


AskDialBack = Callable[[Network, Clock, PeerId, Address | None], Awaitable[DialReport]]


class ReachService:
    """The reachability service of one node. It dials others back from the start. `run` also tests this node's
    own reachability, and `echo` echoes datagrams. `ask` is `ask_dial_back` or a substitute."""

    def __init__(
        self,
        network: Network,
        clock: Clock,
        settings: ReachSettings = REACH,
        *,
        counters: Counter[str],
        ask: AskDialBack = ask_dial_back,
    ) -> None:
        self._settings = settings
        self._ask_dial_back = ask
        self._network = network
        self._clock = clock
        self._counters = counters
        self.families = FamilyVerdicts()
        """The verdict on each IP version separately."""
        self._hurried = 0
        self._served: OrderedDict[PeerId, tuple[float, str]] = OrderedDict()
        self._serving = 0
        self._echoes = (0.0, 0)
        self._moved = trio.Event()
        network.handle(PROTOCOL, self._serve)

    async def run(
        self,
        rng: Random,
        peers: Callable[[], Collection[PeerId]],
        changed: Callable[[bool | None, int, tuple[Address, ...]], None],
    ) -> None:
        """Ask some of `peers` now and then, until cancelled.

        `changed(verdict, asked, addresses)` is called for each answer. `addresses` are those that enough
        others have confirmed and that this node does not announce yet.
        """
        core = Reachability(rng, self._clock.monotonic(), self._settings)
        while True:
            with trio.move_on_at(core.deadline):
                await self._moved.wait()
                self._moved = trio.Event()
                core = Reachability(rng, self._clock.monotonic(), self._settings)
                self.families, self._hurried = FamilyVerdicts(), 0
                continue
            others = [peer for peer in peers() if peer != self._network.peer]
            # Use the deadline as the least time: a clock of whole microseconds may show slightly less.
            networks = count_networks(map(self._network.host_of, others))
            peer = core.next(max(self._clock.monotonic(), core.deadline), others, networks)
            if peer is not None and await self._ask(core, peer, others):
                own = {address.of(None) for address in self._network.addresses}
                unknown = tuple(address for address in core.addresses if address not in own)
                changed(core.verdict, core.asked, unknown)

    def move(self) -> None:
        """Note that this node has moved, so earlier reports are about its old address."""
        self._moved.set()

    async def _ask(self, core: Reachability, peer: PeerId, others: Collection[PeerId]) -> bool:
        """Ask one peer; return whether it tried to dial."""
        families = {family: address for address in self._known(peer) if (family := family_of(address))}
        family = self.families.next(self.own_families(), families)
        report = None
        if family is not None:
            self.families.tried(self._clock.monotonic(), family)
            report = await self._report(peer, families[family])
        if report is None:
            # Ask again at any address: a firewall may block requests over one IP version, which says nothing
            # about the other.
            report = await self._report(peer) or DialReport(self._clock.monotonic(), None, ())
        self.families.note(report.at, peer, report)
        if report.outcomes:
            core.answered(report.at, peer, report)
            if self._may_hurry(report.at, others):
                core.hurry(report.at)
        else:
            core.failed(report.at, peer)
        return bool(report.outcomes)

    async def _report(self, peer: PeerId, at: Address | None = None) -> DialReport | None:
        """Return a peer's report; it has no outcomes if it is useless. Return None if the peer cannot be
        reached."""
        try:
            return await self._ask_dial_back(self._network, self._clock, peer, at)
        except Unreachable:
            return None
        except (StreamClosed, RemoteProtocolError):
            return DialReport(self._clock.monotonic(), None, ())

    def _may_hurry(self, now: float, others: Collection[PeerId]) -> bool:
        """Return whether some peer can test an IP version without a verdict that was not tested too often
        yet."""
        own = self.own_families()
        unknown = self.families.unknown(own, now) if len(own) > 1 else set()
        if not unknown:
            self._hurried = 0
            return False
        # twice as many, because some peers can be asked only over the other version
        if self._hurried >= 2 * FAMILY_OTHERS:
            return False
        if not any(family_of(address) in unknown for peer in others for address in self._known(peer)):
            return False
        self._hurried += 1
        return True

    def own_families(self) -> set[int]:
        """Return the IP versions at which others may try to reach this node."""
        own = [each for each in self._network.addresses if each.relay is None]
        return {family for each in own if (family := family_of(each))}

    def _known(self, peer: PeerId) -> list[Address]:
        """Return a peer's public addresses, the best one last."""
        known = [each for each in self._network.known_addresses(peer) if each.relay is None]
        return [each for each in reversed(known) if is_global(each.host)]

    # Answering other peers.

    async def _serve(self, stream: Stream) -> None:
        request: DialBack = decode(await stream.receive(), DialBack, bytes_max=MESSAGE_BYTES_MAX)
        source = stream.source
        if source is None or not self._admits(stream.peer, source.host):
            self._counters["dial_backs_refused"] += 1
            await stream.send(encode(Dialled("" if source is None else source.host, ())))
            return
        self._serving += 1
        try:
            self._counters["dial_backs"] += 1
            outcomes = []
            for port in dict.fromkeys(request.ports):
                outcomes.append(Outcome(port, await self._dial(make_address(source.host, port, stream.peer))))
        finally:
            self._serving -= 1
        await stream.send(encode(Dialled(source.host, tuple(outcomes))))

    async def _dial(self, address: Address) -> str:
        with trio.move_on_after(DIAL_SECONDS):
            try:
                await self._network.identify(address)
            except Unreachable as error:
                return error.reason if error.reason in REASONS else "refused"
            return ""
        return "timeout"

    def _admits(self, peer: PeerId, host: str) -> bool:
        """Return whether to serve a request. The limits are one request in a while for each peer, a few for
        each host, and few at a time."""
        now = self._clock.monotonic()
        while self._served and next(iter(self._served.values()))[0] + PAUSE_SECONDS < now:
            self._served.popitem(last=False)
        if self._serving >= SERVED_MAX or len(self._served) >= SERVED_KEPT_MAX or peer in self._served:
            return False
        if sum(of == host for _, of in self._served.values()) >= HOST_SERVED_MAX:
            return False
        self._served[peer] = (now, host)
        return True

    async def echo(self) -> None:
        """Send datagrams back until cancelled."""
        inbox = self._network.inbox(PROTOCOL)
        while True:
            for sender, data in await inbox.take(self._clock.monotonic() + ASK_SECONDS):
                self._send_back(sender, data)

    def _send_back(self, sender: PeerId, data: bytes) -> None:
        since, count = self._echoes
        now = self._clock.monotonic()
        if now - since >= 1:
            since, count = now, 0
        self._echoes = since, count + 1
        if count >= ECHOES_PER_SECOND_MAX:
            self._counters["echoes_over_rate"] += 1
            return
        try:
            echo: Echo = decode(data, Echo, bytes_max=MESSAGE_BYTES_MAX)
        except RemoteProtocolError:
            self._counters["echoes_malformed"] += 1
            return
        if echo.asks:
            self._network.send(sender, PROTOCOL, encode(Echo(False, echo.number, echo.filling)))
