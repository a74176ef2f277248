"""A page on a real socket of this machine, whose node exists only as its state and its events."""

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, Literal

import trio

from crypto.identity import PeerId
from node import events
from node.config import Config, Web, read_web
from node.control import CommandHandler, Emit
from node.errors import UsageError
from node.history import EventHistory
from node.state import State, apply
from node.web.page import Page
from node.web.settings import WebSettings
from sim.storage import MemoryStorage

STARTED = 1_700_000_000.0


def peer(number: int) -> PeerId:
    """Return a peer id for a number."""
    return PeerId(number.to_bytes(32, "big"))


def capacity(at: float = STARTED, location: str = "") -> events.CapacityMeasured:
    return events.CapacityMeasured(
        at=at,
        device="cpu",
        cores=4,
        memory_free_bytes=8_000_000_000,
        memory_total_bytes=16_000_000_000,
        flops_per_second=100e9,
        location=location,
    )


def joined(number: int, at: float = STARTED, location: str = "") -> events.MemberJoined:
    return events.MemberJoined(
        at=at,
        peer=peer(number),
        name=f"n{number}",
        addresses=(f"10.0.{number // 256}.{number % 256}:9747",),
        found_through="itself",
        capacity=capacity(at, location),
    )


def started() -> events.NodeStarted:
    return events.NodeStarted(
        at=STARTED,
        peer=peer(0),
        name="here",
        swarm="test",
        addresses=("127.0.0.1:9747",),
        identity_is_new=True,
        data_dir="/nowhere",
        port_wanted=9747,
        port=9747,
    )


def run_events(run: str = "ab" * 8, steps: int = 3) -> list[events.Event]:
    """Return the events of a run of two stages of two replicas, with some steps and a death."""
    at = STARTED + 10
    happened: list[events.Event] = [
        events.RunAccepted(at=at, run=run, model="cnn", data="digits", steps=steps, requester=peer(0)),
        events.RunPlanned(
            at=at,
            run=run,
            plan="cd" * 8,
            height=0,
            trainer=peer(0),
            planner=peer(1),
            layers=((0, 3), (3, 5)),
            stages=((peer(1), peer(2)), (peer(3), peer(4))),
        ),
        events.RunChanged(at=at, run=run, state="running", reason="running as first planned"),
    ]
    for step in range(steps):
        happened.append(
            events.StepCommitted(
                at=at + step,
                run=run,
                step=step,
                loss=2.3 / (step + 1),
                samples=128,
                seconds=0.5,
                replicas=4,
                utilisation=(0.8, 0.4),
                bubble=0.4,
                sent_bytes=(1000, 0),
                returned_bytes=(0, 900),
            )
        )
    return happened


@dataclass
class _Network:
    """The peers that were heard; the page uses no other part of this interface."""

    heard: set[PeerId] = field(default_factory=set)

    def host_of(self, member: PeerId) -> str | None:
        return "10.0.0.1" if member in self.heard else None


class _Clock:
    def monotonic(self) -> float:
        return trio.current_time()

    def wall(self) -> float:
        return STARTED + trio.current_time()


class _Executor:
    async def run(self, work: Callable[[], Any]) -> Any:
        return work()


@dataclass
class _Seams:
    network: _Network = field(default_factory=_Network)
    clock: _Clock = field(default_factory=_Clock)
    storage: MemoryStorage = field(default_factory=MemoryStorage)
    executor: _Executor = field(default_factory=_Executor)

    def entropy(self, count: int) -> bytes:
        return bytes(range(count))


@dataclass
class Told:
    """The part of `node.runtime.Node` that a page uses, without the node."""

    config: Config = field(default_factory=lambda: Config(name="here", web=read_web("127.0.0.1:0")))
    state: State = field(default_factory=State)
    seams: Any = field(default_factory=_Seams)
    history: EventHistory = field(default_factory=EventHistory)
    counters: dict[str, int] = field(default_factory=dict)
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    runs: Any = field(default_factory=lambda: SimpleNamespace(members={}))
    measurements: Any = None
    inbound: Any = field(default_factory=lambda: SimpleNamespace(path_to=lambda _peer: None))
    serving: Any = field(
        default_factory=lambda: SimpleNamespace(
            finder=None, generations=SimpleNamespace(newest={}), hosting=SimpleNamespace(own=list)
        )
    )

    def publish(self, event: events.Event) -> None:
        self.state = apply(self.state, event)
        self.history.append(event)

    def limit(self, *, accept_runs: Literal["swarm", "never"]) -> None:
        resources = replace(self.config.resources, accept_runs=accept_runs)
        self.config = replace(self.config, resources=resources)

    @property
    def handlers(self) -> dict[str, CommandHandler]:
        async def stop(arguments: dict[str, Any], emit: Emit) -> object:
            self.asked.append(("runs.stop", arguments))
            if arguments.get("run") != "ab" * 8:
                raise UsageError("run is not known here")
            return {"stopped": True}

        async def train(arguments: dict[str, Any], emit: Emit) -> object:
            self.asked.append(("train", arguments))
            return {"run": "ab" * 8, "status": "running", "plan": []}

        return {"runs.stop": stop, "train": train}


@dataclass
class Served:
    """A running page, and its node."""

    node: Told
    page: Page
    port: int

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def raw(self, data: bytes, *, seconds: float = 10.0) -> bytes:
        """Send these bytes. Return everything that comes back before the server closes."""
        with trio.fail_after(seconds):
            stream = await trio.open_tcp_stream("127.0.0.1", self.port)
            async with stream:
                received = bytearray()
                try:
                    await stream.send_all(data)
                    async for chunk in stream:
                        received += chunk
                except trio.BrokenResourceError:
                    pass  # the server closed without reading everything; its answer counts
                return bytes(received)

    async def ask(
        self, path: str, *, method: str = "GET", body: bytes = b"", **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Return (status, headers, body) of one request; `headers` names have _ for -."""
        fields = {"host": self.host, "connection": "close", "x-peerloom-token": self.page.token}
        fields |= {name.replace("_", "-"): value for name, value in headers.items()}
        if body or method == "POST":
            fields["content-length"] = str(len(body))
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
        answer = await self.raw("\r\n".join(lines).encode() + body)
        head, _, rest = answer.partition(b"\r\n\r\n")
        first, *others = head.decode("latin-1").split("\r\n")
        pairs = dict(line.lower().split(": ", 1) for line in others)
        return int(first.split(" ")[1]), pairs, rest

    async def json(self, path: str) -> Any:
        """Return the document at `path`, which must exist."""
        status, _, body = await self.ask(path)
        assert status == 200, body
        return json.loads(body)


@asynccontextmanager
async def served(
    node: Told | None = None, settings: WebSettings | None = None
) -> AsyncGenerator[Served, None]:
    """Run a page while the block lasts."""
    node = node or Told()
    page = Page(node, settings)
    async with trio.open_nursery() as nursery:
        await nursery.start(page.run)
        assert node.state.page is not None
        yield Served(node, page, int(node.state.page.address.rpartition(":")[2]))
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def stream(page: Served, last: str = "") -> AsyncGenerator["Messages", None]:
    """The live stream of a page, as a browser reads it."""
    async with await trio.open_tcp_stream("127.0.0.1", page.port) as connection:
        resumed = f"last-event-id: {last}\r\n" if last else ""
        resumed += f"x-peerloom-token: {page.page.token}\r\n"
        await connection.send_all(f"GET /api/stream HTTP/1.1\r\nhost: {page.host}\r\n{resumed}\r\n".encode())
        yield Messages(connection)


class Messages:
    """A reader of server-sent events in a chunked answer."""

    def __init__(self, connection: trio.SocketStream) -> None:
        self._connection = connection
        self._buffer = b""

    async def next(self) -> tuple[str, str, Any]:
        """Return (kind, id, document) of the next event."""
        with trio.fail_after(10):
            while True:
                start = self._buffer.find(b"event: ")
                end = self._buffer.find(b"\n\n", start)
                if start >= 0 and end >= 0:
                    text, self._buffer = self._buffer[start:end], self._buffer[end + 2 :]
                    fields = dict(line.split(": ", 1) for line in text.decode().split("\n"))
                    return fields["event"], fields["id"], json.loads(fields["data"])
                received = await self._connection.receive_some(1 << 20)
                assert received, "the stream ended before the next event"
                self._buffer += received

    async def until(self, name: str) -> Any:
        """Return the next document that holds `name`."""
        while True:
            _, _, document = await self.next()
            if document.get(name):
                return document


OFF = Web(None)
