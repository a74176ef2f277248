"""Services of real nodes whose processes are killed during answers, and the outcome of each stream.

`Ground` holds the nodes and kills them. `Streams` constantly requests answers, and compares each with the
undisturbed answer. `tests.test_serving_processes` plays a few kills, `tests.test_serving_kills` many.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from node.cli.client import ask
from node.demo.processes import SwarmProcesses
from node.errors import PeerloomError
from partition.capture.models.model_spec import capture_built_in

SECONDS_MAX = 90.0
"""Seconds allowed on a machine that is three times slower than ours, and busy."""
LOOK_SECONDS = 0.05
PROMPT = "In olden times, when wishing still helped, there lived a king by the sea"
"""A prompt long enough that a session starts from tokens that an earlier session has read of it."""
CONTEXT = 256


def until(
    holds: Callable[[], bool], seconds: float = SECONDS_MAX, what: str = "the condition did not hold in time"
) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"{what} in {seconds:.0f} s"
        threading.Event().wait(LOOK_SECONDS)


class Ground:
    """Nodes of one swarm, the first of which is the door (the node that asks the service). Call `close` at
    the end."""

    def __init__(self, folder: Path, nodes: Mapping[str, tuple[int, int]]) -> None:
        """`nodes` gives the slots and the cores of each node, by name."""
        self.folder = folder
        self.sizes = nodes
        self.names = list(nodes)
        self.swarm = SwarmProcesses(folder, "serving", time.sleep, calibrate=False)
        self.dead: set[str] = set()

    def start(self, count: int = 0) -> None:
        """Start all nodes, or the first `count`, and wait until they know each other; `restart` starts the
        others."""
        names = self.names[: count or None]
        self.dead |= set(self.names) - set(names)
        for name in names:
            self._launch(name)
        first = self.swarm.start(names[0], None, self._flags(names[0]))
        for name in names[1:]:
            self.swarm.start(name, first.address, self._flags(name))
        self.meet()

    def _launch(self, name: str) -> None:
        self.swarm.launch([name], {"PEERLOOM_SLOTS": str(self.sizes[name][0])})

    def _flags(self, name: str) -> list[str]:
        return ["--cores", str(self.sizes[name][1]), "--log", "json"]

    def meet(self) -> None:
        living = [name for name in self.names if name not in self.dead]
        until(
            lambda: all(
                len(ask(self.folder / name, "peers", seconds=SECONDS_MAX)["peers"]) >= len(living) - 1
                for name in living
            )
        )

    @property
    def door(self) -> Path:
        return self.folder / self.names[0]

    def serve(self, name: str, at: str, **wish: Any) -> None:
        """Publish the model under a name, and wait until it answers."""
        model = self.folder / "words.peerloom"
        if not model.exists():
            options = {"layers": 2, "heads": 2, "width": 32}
            model.write_bytes(capture_built_in("gpt", (CONTEXT,), 256, options=options).data)
        asked = {"model": str(model), "wish": {"name": name, "stages": 2, **wish}}
        ask(self.folder / at, "serve", asked, seconds=SECONDS_MAX)

    # Holders of stages

    def stages(self, service: str) -> list[list[dict[str, Any]]]:
        """Return the holders that answer for each stage; an empty list if the service does not answer."""
        rows = ask(self.door, "services", seconds=SECONDS_MAX)["services"]
        return next((list(row["stages"]) for row in rows if row["name"] == service), [])

    def is_whole(self, service: str, replicas: int = 1) -> bool:
        """Return whether every stage has this many holders that answer."""
        rows = self.stages(service)
        return bool(rows) and all(len(each) >= replicas for each in rows)

    def name_of(self, peer: str) -> str:
        return next(name for name, node in self.swarm.nodes.items() if node.peer == peer)

    def holders(self, service: str) -> list[list[str]]:
        """Return the nodes of each stage, by name."""
        return [[self.name_of(row["peer"]) for row in rows] for rows in self.stages(service)]

    def processes(self, name: str) -> list[psutil.Process]:
        """Return the stage processes of a node, the oldest first."""
        with suppress(psutil.NoSuchProcess):
            found = psutil.Process(self.swarm.nodes[name].process.pid).children(recursive=True)
            found = [each for each in found if "node.stages.process" in " ".join(_words(each))]
            return sorted(found, key=lambda each: (each.create_time(), each.pid))
        return []

    # Kills

    def kill_stage(self, name: str) -> None:
        """Send SIGKILL to the process of one stage of a live node. A spare process has mapped no memory for
        tensors, so it is not chosen."""
        for process in list(filter(_maps_exchange, self.processes(name)))[:1]:
            with suppress(psutil.NoSuchProcess):
                process.kill()

    def kill_node(self, name: str) -> None:
        """Send SIGKILL to a node and its stages, like a power cut."""
        self.dead.add(name)
        self.swarm.kill(name)

    def kill_node_alone(self, name: str) -> None:
        """Send SIGKILL to a node's own process; its stages must end by themselves."""
        self.dead.add(name)
        self.swarm._ended.add(name)
        process = self.swarm.nodes[name].process
        os.kill(process.pid, signal.SIGKILL)
        process.wait()

    def leave_node(self, name: str) -> None:
        """Make a node leave: it hands over its work, then its process ends."""
        self.dead.add(name)
        self.swarm.leave(name)

    def restart(self, name: str) -> None:
        """Restart a killed or departed node on its folder."""
        self._launch(name)
        self.swarm.start(name, self.swarm.nodes[self.names[0]].address, self._flags(name))
        self.dead.discard(name)

    def close(self) -> None:
        self.swarm.close()


def _words(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return list(process.cmdline())
    return []


def _maps_exchange(process: psutil.Process) -> bool:
    with suppress(OSError):
        return "memfd:peerloom-exchange" in Path(f"/proc/{process.pid}/maps").read_text()
    return False


@dataclass
class Question:
    """A stream's question, and the tokens of its undisturbed answer."""

    service: str
    seed: int
    temperature: float
    tokens: int
    expected: list[int] = field(default_factory=list)

    def ask(self, door: Path, on_token: Callable[[int], object]) -> dict[str, Any]:
        """Ask, and return the outcome. Raises PeerloomError."""
        question = {
            "prompt": list(f"{PROMPT} {self.seed}".encode()),
            "tokens_max": self.tokens,
            "temperature": self.temperature,
            "seed": self.seed,
        }

        def on_event(event: dict[str, Any]) -> None:
            if "piece" in event:
                on_token(event["piece"])

        asked = {"service": self.service, "question": question}
        found: dict[str, Any] = ask(door, "generate", asked, on_event, seconds=SECONDS_MAX)
        return found


class Streams:
    """`count` threads, each of which asks repeatedly until `stop`; their answers are compared as they come.
    Questions alternate between greedy and seeded sampling, and between the services.
    """

    def __init__(self, door: Path, services: Sequence[str], count: int, tokens: int) -> None:
        self._door = door
        self._questions = [
            Question(services[number // 2 % len(services)], number, float(number % 2), tokens)
            for number in range(count)
        ]
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._newest = [0.0] * count
        self._gaps: list[list[tuple[float, float]]] = [[] for _ in range(count)]
        """For each stream: the time of each token, and the seconds since the previous token or the
        question."""
        self.answers = 0
        self.moves = 0
        self.failures: list[str] = []
        self._threads = [
            threading.Thread(target=self._ask_on, args=(number,), daemon=True) for number in range(count)
        ]

    def begin(self) -> None:
        """Record the expected answers, then start to ask."""
        for each in self._questions:
            each.ask(self._door, each.expected.append)
            assert len(each.expected) == each.tokens
        for thread in self._threads:
            thread.start()
        self.flow()

    def flow(self) -> None:
        """Wait until every stream has delivered a new token."""
        since = time.monotonic()
        until(
            lambda: bool(self.failures) or all(at > since for at in self._newest),
            what=f"not every stream delivered a token: {self.failures}",
        )
        assert not self.failures, self.failures[0]

    def pauses(self, since: float) -> list[float]:
        """Return the longest pause of each stream that ended after `since`."""
        with self._lock:
            return [max((gap for at, gap in rows if at > since), default=0.0) for rows in self._gaps]

    def stop(self) -> None:
        """Let the current answers finish, and ask no more."""
        self._over.set()
        for thread in self._threads:
            thread.join(SECONDS_MAX)
        assert not self.failures, self.failures[0]

    def _ask_on(self, number: int) -> None:
        question = self._questions[number]
        while not self._over.is_set() and not self.failures:
            said: list[int] = []
            before = time.monotonic()

            def on_token(token: int, said: list[int] = said) -> None:
                nonlocal before
                said.append(token)
                now = time.monotonic()
                with self._lock:
                    self._gaps[number].append((now, now - before))
                self._newest[number] = before = now

            try:
                went = question.ask(self._door, on_token)
            except PeerloomError as error:
                self.failures.append(f"stream {number} after {len(said)} tokens: {error}")
                return
            if said != question.expected:
                first = next(n for n in range(len(said)) if said[n] != question.expected[n])
                self.failures.append(f"stream {number}: token {first} differs ({went})")
            with self._lock:
                self.answers += 1
                self.moves += went["moves"]
