"""A victim's process: a whole node as the daemon runs it, whose event loop is timed. It may request runs.

It answers one command at a time on its pipe. `figures` returns what it has used so far; `heard`, what any
member of its runs knows of them; `told`, its latest events of runs; `train` begins a run; `trained` returns
the run's outcome, None while it goes on.
"""

import os
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import psutil
import trio

from crypto.encoding import encode
from node import config, containment
from node.checkpoints.weights import weights_name
from node.content.graphs import graph_name
from node.events import Event, RunEnded
from node.placement.leases import PlacementFailed
from node.process import spare_imports
from node.protocols.manifest import Manifest, make_run
from node.runtime import Node
from node.services.capacity import Capacity
from partition.plan.plan import encode_plan
from tests.hostile.loop_steps import LoopSteps

HOST = "127.0.0.1"
SWARM = "hostile members"
NOT_PLACED = "not placed"
"""The outcome of a run for which no free slots were found."""
HEARD_MAX = 100
"""How many of the latest messages that it has sent in runs are kept, as another member would have received
them."""

TOLD_MAX, TOLD_LENGTH_MAX = 40, 300
"""Maximum number of kept events of runs, and of their length."""


def settings(name: str, folder: Path, **resources: Any) -> config.Config:
    """Return the settings of every node of the scene."""
    return config.Config(
        name=name,
        data_dir=folder,
        swarm=config.SwarmSettings(name=SWARM, preset="local"),
        listen=config.Listen(addresses=(config.read_listen(f"{HOST}:0"),)),
        join=config.JoinSettings(lan=False),
        resources=config.Resources(**resources),
    )


def capacity() -> Capacity:
    """Return the same fixed capacity for all nodes, so that none measures while others compute."""
    return Capacity("cpu", 1, 8 << 30, 16 << 30, 5e9, "")


def word(connection: Connection) -> Any:
    """Return the next command; None if the other end of the pipe is gone."""
    try:
        return connection.recv()
    except EOFError:
        return None


def be_watched(connection: Connection, folder: Path, name: str, join: str | None) -> None:
    """Run the process. It sends its address and peer id, then answers until it is told to stop."""
    folder.mkdir()
    containment.write_log(folder)
    spare_imports()  # as the daemon does
    steps = LoopSteps()
    trio.run(_Watched(connection, folder, name, join, steps).run, instruments=[steps])


class _Watched:
    def __init__(
        self, connection: Connection, folder: Path, name: str, join: str | None, steps: LoopSteps
    ) -> None:
        self._connection = connection
        self._folder = folder
        self._name = name
        self._join = join
        self._steps = steps
        self._heard: deque[bytes] = deque(maxlen=HEARD_MAX)
        self._told: deque[str] = deque(maxlen=TOLD_MAX)
        self._trained: dict[str, Any] | None = None
        self._process = psutil.Process()

    async def run(self) -> None:
        made = Node(
            settings(self._name, self._folder),
            join=[self._join] if self._join is not None else [],
            capacity=capacity(),
            observe=self._observe,
            report=self._report,
        )
        async with made as node, trio.open_nursery() as nursery:
            self._connection.send((node.network.addresses[0].short, node.peer))
            while (
                said := await trio.to_thread.run_sync(word, self._connection, abandon_on_cancel=True)
            ) is not None:
                match said:
                    case "figures":
                        self._connection.send(self._figures(node))
                    case "heard":
                        self._connection.send(self._what_is_known(node))
                    case "told":
                        self._connection.send(list(self._told))
                    case "trained":
                        self._connection.send(self._trained)
                    case ("train", bytes(wanted), bytes(graph)):
                        self._trained = None
                        nursery.start_soon(self._train, node, wanted, graph)
                        self._connection.send("begun")
            nursery.cancel_scope.cancel()

    def _report(self, event: Event) -> None:
        """Record a run's event, to find out why a run does not end."""
        if hasattr(event, "run"):
            self._told.append(str(event)[:TOLD_LENGTH_MAX])

    def _observe(self, event: object) -> None:
        """Record only messages of runs: events of the cores have no wire form."""
        if isinstance(event, msgspec.Struct):
            data = encode(event)
            if len(data) < 1 << 16:
                self._heard.append(data)

    def _figures(self, node: Node) -> dict[str, Any]:
        return {
            "rss_bytes": self._process.memory_info().rss,
            "disk_bytes": sum(path.lstat().st_size for path in self._folder.rglob("*") if path.is_file()),
            "steps": self._steps.count,
            "longest": list(self._steps.longest),
            "failures": dict(containment.failures),
            "counters": node.counters,
            "live": len(node.membership.live),
        }

    def _what_is_known(self, node: Node) -> dict[str, Any]:
        runs = [
            (encode(member.run.fact), None if member.plan is None else encode_plan(member.plan))
            for member in node.runs.members.values()
        ]
        return {"messages": list(self._heard), "runs": runs}

    async def _train(self, node: Node, wanted: bytes, graph: bytes) -> None:
        manifest = msgspec.msgpack.decode(wanted, type=Manifest)
        node.seams.storage.write(graph_name(manifest.graph_hash), graph)
        run = make_run(node.signer, manifest)
        with node.watch() as events:
            try:
                await node.runs.submit(run)
            except PlacementFailed as error:
                self._trained = {"outcome": NOT_PLACED, "detail": str(error), "weights": None}
                return
            async for event in events:
                if isinstance(event, RunEnded) and event.run == run.text:
                    weights = node.seams.storage.read(weights_name(run.text))
                    self._trained = {"outcome": event.outcome, "detail": event.detail, "weights": weights}
                    return


def log_of(folder: Path) -> str:
    """Return a node's log of its own failures."""
    path = folder / containment.LOG_NAME
    return path.read_text(encoding="utf-8") if os.path.exists(path) else ""
