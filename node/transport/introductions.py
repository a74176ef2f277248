"""Introduces two peers that both know this node but have no path to each other. It relays their messages
until both dial simultaneously (`punch_messages`).

A message of about a hundred bytes tells a peer about the other peer, and the recipient opens a stream itself,
so this node dials nobody for it. Only the messages of that conversation are relayed, bounded in number, size
and time.
"""

from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field

import trio

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.containment import contain
from node.errors import StreamClosed, Unreachable
from node.seams import Clock, Stream
from node.transport.network import RealNetwork
from node.transport.punch_messages import (
    MESSAGE_BYTES_MAX,
    PROTOCOL,
    TOKEN_BYTES,
    Introduced,
    Meet,
    Passed,
    PunchOffer,
    read_message,
)
from node.transport.punching import IntroductionBudget

COME_SECONDS = 4.0
"""How long to wait for the introduced peer to open its stream."""
TOGETHER_SECONDS = 15.0
"""Time limit of the whole conversation. Each peer first asks others for its public address."""
PASSED_MAX = 3
"""Maximum number of messages from each peer: an offer, a round trip, and Begin."""
COMING_MAX = 4
"""Maximum number of introductions by others that this node follows simultaneously. A further one replaces the
oldest of the sender with the most introductions, so no sender keeps others out."""
WAIT_SECONDS = 60.0
HEARD_SECONDS = 60.0
"""A peer is introduced only if a datagram from it came within this time, or if there is a path to it. Routers
keep a mapping for about this long."""


@dataclass(eq=False)
class _Waiting:
    target: PeerId
    came: trio.Event = field(default_factory=trio.Event)
    over: trio.Event = field(default_factory=trio.Event)
    far: Stream | None = None


@dataclass(eq=False)
class _Coming:
    sender: PeerId
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


class Introductions:
    """The introduction service of one node. It introduces others, and meets peers that others introduce.
    `may_come` returns whether a peer may now introduce this node to another peer; `meet` answers an offer."""

    def __init__(
        self,
        network: RealNetwork,
        clock: Clock,
        counters: Counter[str],
        may_come: Callable[[PeerId], bool],
        meet: Callable[[Stream, PunchOffer, PeerId], Awaitable[None]],
    ) -> None:
        self._network = network
        self._clock = clock
        self._counters = counters
        self._may_come = may_come
        self._meet = meet
        self._inbox = network.inbox(PROTOCOL)
        # The oldest comes first.
        self._coming: list[_Coming] = []
        self._waiting: dict[bytes, _Waiting] = {}
        self.budget = IntroductionBudget()

    # --- for this node -------------------------------------------------------------------------------

    async def run(self) -> None:
        """Meet peers that others introduce, until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                for sender, data in await self._inbox.take(self._clock.monotonic() + WAIT_SECONDS):
                    try:
                        told: Introduced = decode(data, Introduced, bytes_max=MESSAGE_BYTES_MAX)
                    except RemoteProtocolError:
                        self._counters["introductions_malformed"] += 1
                        continue
                    peer = PeerId(told.peer)
                    is_other = peer not in (sender, self._network.peer)
                    if is_other and self._may_come(sender):
                        self._make_room(sender)
                        self._coming.append(coming := _Coming(sender))
                        nursery.start_soon(self._come, coming, told.token, peer)

    def _make_room(self, sender: PeerId) -> None:
        if len(self._coming) >= COMING_MAX:
            counts = Counter([sender, *(each.sender for each in self._coming)])
            most = max(counts.values())
            spare = next(each for each in self._coming if counts[each.sender] == most)
            self._coming.remove(spare)
            spare.scope.cancel()

    async def _come(self, coming: _Coming, token: bytes, peer: PeerId) -> None:
        """Open a conversation with a peer through the introducer `coming.sender`."""
        common = coming.sender
        with contain("meeting a peer"), coming.scope:
            try:
                stream = await self._network.open(common, PROTOCOL, message_bytes_max=MESSAGE_BYTES_MAX)
                try:
                    await stream.send(encode(Meet(token)))
                    with trio.fail_after(TOGETHER_SECONDS):
                        offer = read_message(await stream.receive())
                        if not isinstance(offer, PunchOffer):
                            raise RemoteProtocolError("no offer")
                    await self._meet(stream, offer, peer)
                finally:
                    stream.close()
            except (Unreachable, StreamClosed, RemoteProtocolError, trio.TooSlowError):
                self._counters["introductions_broken"] += 1
            finally:
                if coming in self._coming:
                    self._coming.remove(coming)

    # --- for others ----------------------------------------------------------------------------------

    async def introduce(self, stream: Stream, target: PeerId) -> None:
        """Introduce `target` to the peer that requests this on a stream. If that is impossible, the stream
        ends."""
        if not self._may_introduce(stream.peer, target):
            self._counters["introductions_refused"] += 1
            return
        token = self._network.credentials.entropy(TOKEN_BYTES)
        waiting = self._waiting[token] = _Waiting(target)
        try:
            self._network.send(target, PROTOCOL, encode(Introduced(token, stream.peer)))
            with trio.move_on_after(COME_SECONDS):
                await waiting.came.wait()
            if waiting.far is not None:
                self._counters["introductions"] += 1
                with trio.move_on_after(TOGETHER_SECONDS), suppress(StreamClosed):
                    await self._pass_on(stream, waiting.far)
        finally:
            del self._waiting[token]
            waiting.over.set()

    async def meet(self, stream: Stream, token: bytes) -> None:
        """Serve a peer that comes for an introduction. Its stream is kept until the two are done."""
        waiting = self._waiting.get(token)
        if waiting is not None and waiting.far is None and waiting.target == stream.peer:
            waiting.far = stream
            waiting.came.set()
            await waiting.over.wait()

    def _may_introduce(self, asker: PeerId, target: PeerId) -> bool:
        now = self._clock.monotonic()
        is_near = now - self._network.heard_at(target) <= HEARD_SECONDS
        is_near = is_near or self._network.multiplexed.best(target) is not None
        is_other = target not in (asker, self._network.peer)
        return is_other and is_near and self.budget.may_introduce(asker, target, now)

    async def _pass_on(self, near: Stream, far: Stream) -> None:
        """Pass messages on in both directions until either peer is done; then raise StreamClosed."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._pass, near, far)
                nursery.start_soon(self._pass, far, near)
        except* StreamClosed:
            raise StreamClosed("either peer is done") from None

    async def _pass(self, source: Stream, target: Stream) -> None:
        for _ in range(PASSED_MAX):
            data = await source.receive()
            decode(data, Passed, bytes_max=MESSAGE_BYTES_MAX)
            await target.send(data)
        with suppress(StreamClosed):
            await source.receive()
            raise RemoteProtocolError("more messages than two peers need")
