"""The honest peer's process: it constantly sends requests to the victim, as a node does, and counts the
answers."""

import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

import trio

from crypto.contact import make_address
from crypto.identity import Identity
from node.errors import StreamClosed, Unreachable
from node.seams import RealClock, Stream
from node.transport.network import RealNetwork
from tests.hostile.attack import Target
from tests.hostile.guests import ECHO
from tests.hostile.victim import ASK, HOST

DATAGRAM_SECONDS = 0.05
"""Seconds between two requests by datagram."""
DATAGRAM_RETRY_SECONDS = 0.5
"""Seconds before a request is repeated, as for a SWIM probe or a DHT query."""
STREAM_SECONDS = 1.0
"""Seconds between two requests on the open stream, and between opening two streams."""
CONNECT_SECONDS = 2.0
"""Seconds between two new connections."""
RETRY_SECONDS = 0.2
DEADLINE_SECONDS = 15.0
"""Seconds after which a request counts as unanswered, despite retries."""
REQUEST_BYTES = 200


@dataclass
class Tally:
    """Counts of the requests of one kind. `tries` beyond `asked` are retries."""

    asked: int = 0
    tries: int = 0
    answered: int = 0
    slowest_seconds: float = 0.0
    why: str = ""


class Asker:
    """Sends requests until it is told to pause. `pause` returns once all requests were answered or given
    up."""

    def __init__(self, network: RealNetwork, target: Target) -> None:
        self._network = network
        self._target = target
        self._is_paused = False
        self._asking = 0
        self._waiting: dict[bytes, trio.Event] = {}
        self._stream: Stream | None = None
        self.tallies = {kind: Tally() for kind in ("datagram", "stream", "opened", "connected")}

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._take_answers)
            for kind, period, ask in (
                ("datagram", DATAGRAM_SECONDS, self._ask_by_datagram),
                ("stream", STREAM_SECONDS, self._ask_on_stream),
                ("opened", STREAM_SECONDS, self._ask_on_new_stream),
                ("connected", CONNECT_SECONDS, self._connect),
            ):
                nursery.start_soon(self._keep_asking, nursery, kind, period, ask)

    async def pause(self) -> None:
        self._is_paused = True
        while self._asking:  # noqa: ASYNC110 - whoever asks has a deadline
            await trio.sleep(0.01)

    def resume(self) -> None:
        self._is_paused = False

    async def _keep_asking(
        self, nursery: trio.Nursery, kind: str, period: float, ask: Callable[[], Awaitable[bool]]
    ) -> None:
        while True:
            if not self._is_paused:
                self._asking += 1
                nursery.start_soon(self._ask, kind, ask)
            await trio.sleep(period)

    async def _ask(self, kind: str, ask: Callable[[], Awaitable[bool]]) -> None:
        tally, begun = self.tallies[kind], time.perf_counter()
        tally.asked += 1
        with trio.move_on_after(DEADLINE_SECONDS):
            while True:
                tally.tries += 1
                try:
                    if await ask():
                        tally.answered += 1
                        break
                except (Unreachable, StreamClosed) as error:
                    tally.why = str(error)
                    await trio.sleep(RETRY_SECONDS)
        tally.slowest_seconds = max(tally.slowest_seconds, time.perf_counter() - begun)
        self._asking -= 1

    async def _ask_by_datagram(self) -> bool:
        message = os.urandom(REQUEST_BYTES)
        event = self._waiting[message] = trio.Event()
        try:
            self._network.send(self._target.peer, ASK, message)
            with trio.move_on_after(DATAGRAM_RETRY_SECONDS):
                await event.wait()
        finally:
            del self._waiting[message]
        return event.is_set()

    async def _take_answers(self) -> None:
        inbox = self._network.inbox(ASK)
        while True:
            for _, message in await inbox.take(trio.current_time() + 3_600):
                if message in self._waiting:
                    self._waiting[message].set()

    async def _ask_on_stream(self) -> bool:
        stream, self._stream = self._stream, None
        if stream is None:
            stream = await self._network.open(self._target.peer, ECHO)
        is_right = await _echo(stream)
        self._stream = stream
        return is_right

    async def _ask_on_new_stream(self) -> bool:
        stream = await self._network.open(self._target.peer, ECHO)
        try:
            return await _echo(stream)
        finally:
            await stream.aclose()

    async def _connect(self) -> bool:
        address = make_address(self._target.host, self._target.port)
        return await self._network.identify(address) == self._target.peer


async def _echo(stream: Stream) -> bool:
    message = os.urandom(REQUEST_BYTES)
    await stream.send(message)
    return await stream.receive() == message


def be_honest(connection: Connection, target: Target) -> None:
    """Run the process. It sends "ready" after its first answer. From then on, one message pauses it and makes
    it send its counts, and the next message lets it go on."""
    trio.run(_be_honest, connection, target)


async def _be_honest(connection: Connection, target: Target) -> None:
    identity = Identity(os.urandom(32))
    network = RealNetwork(
        identity,
        os.urandom(32),
        target.swarm,
        clock=RealClock(),
        entropy=os.urandom,
        listen=[(HOST, 0)],
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(network.run)
        network.learn(target.peer, [make_address(target.host, target.port)])
        asker = Asker(network, target)
        nursery.start_soon(asker.run)
        await asker.pause()
        connection.send("ready")
        while word := await trio.to_thread.run_sync(_word, connection, abandon_on_cancel=True):
            if word == "go":
                asker.tallies.update({kind: Tally() for kind in asker.tallies})
                asker.resume()
                continue
            await asker.pause()
            connection.send({kind: asdict(tally) for kind, tally in asker.tallies.items()})
        nursery.cancel_scope.cancel()


def _word(connection: Connection) -> str:
    try:
        return str(connection.recv())
    except EOFError:
        return ""
