"""Starts a victim, an honest peer and hostile clients as processes, and measures them.

Every process started here ends with the scene in any case.
"""

import multiprocessing
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

from tests.hostile.client import ATTACKS, BY_CONNECTIONS, BY_PACKETS, be_hostile
from tests.hostile.honest import DEADLINE_SECONDS, be_honest
from tests.hostile.victim import be_victim

READY_SECONDS = 60.0
"""Seconds allowed to load, prepare the packets, and answer once, on a busy machine."""
ENDING_SECONDS = 5.0
SAMPLE_SECONDS = 0.2
"""Seconds between two measurements of the victim's memory."""


class Far:
    """One of our processes, and the pipe to it."""

    def __init__(self, process: BaseProcess, line: Connection) -> None:
        self.process, self._line = process, line

    def hear(self, seconds: float = READY_SECONDS) -> Any:
        """Return the process's next message. Raises AssertionError if it sends nothing, or has ended."""
        assert self._line.poll(seconds), f"{self.process.name} says nothing for {seconds:g} s"
        try:
            return self._line.recv()
        except EOFError:
            raise AssertionError(f"{self.process.name} has ended") from None

    def ask(self, word: Any, seconds: float = READY_SECONDS) -> Any:
        self.tell(word)
        return self.hear(seconds)

    def tell(self, word: Any) -> None:
        self._line.send(word)


@dataclass(frozen=True)
class Outcome:
    """The outcome of one attack, or of several simultaneous ones. `refused` counts by the victim's own names;
    `tallies` are the honest peer's counts; `highest_bytes` is the victim's peak memory."""

    seconds: float
    strikes: Mapping[str, int]
    refused: Mapping[str, int]
    cpu_seconds: float
    highest_bytes: int
    tallies: Mapping[str, Mapping[str, Any]]

    @property
    def unanswered(self) -> dict[str, str]:
        """Return the honest peer's unanswered requests, by kind."""
        return {
            kind: f"{tally['asked'] - tally['answered']} of {tally['asked']} not answered, {tally['why']}"
            for kind, tally in self.tallies.items()
            if tally["answered"] < tally["asked"]
        }


def start(stack: ExitStack, name: str, main: Callable[..., None], *arguments: Any) -> Far:
    """Start a process that runs `main(pipe, *arguments)`, and ends with `stack`."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=main, args=(theirs, *arguments), name=name, daemon=True)
    process.start()
    theirs.close()
    stack.callback(_end, process, ours)
    return Far(process, ours)


class Scene:
    """Made by `scene`. There is one client process for packets and one for connections."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self._victim = self._start("victim", be_victim, folder, unused_port())
        self.target = self._victim.hear()
        self._memory = psutil.Process(self._victim.process.pid)
        self._honest = self._start("honest peer", be_honest, self.target)
        self._honest.hear()
        self._clients = [
            self._start(f"hostile client {number}", be_hostile, self.target) for number in (1, 2)
        ]

    def _start(self, name: str, main: Callable[..., None], *arguments: Any) -> Far:
        return start(self._stack, name, main, *arguments)

    def figures(self) -> dict[str, Any]:
        """Return the victim's own figures."""
        found: dict[str, Any] = self._victim.ask("figures")
        return found

    @property
    def rss_bytes(self) -> int:
        return int(self._memory.memory_info().rss)

    def run(self, rates: Mapping[str, float], *, seconds: float, honest: bool = True) -> Outcome:
        """Let the attacks strike, each at its rate per second. Without attacks, measure the cost of honest
        traffic."""
        sides = [
            (client, {name: rates[name] for name in rates if ATTACKS[name] in attacks})
            for client, attacks in zip(self._clients, (BY_PACKETS, BY_CONNECTIONS), strict=True)
        ]
        for client, own in sides:
            client.tell(own)
        for client, _ in sides:
            client.hear()
        if honest:
            self._honest.tell("go")
        before, begun = self.figures(), time.perf_counter()
        with self._highest() as highest:
            for client, _ in sides:
                client.tell("begin")
            threading.Event().wait(seconds)
            after, took = self.figures(), time.perf_counter() - begun
            strikes: Counter[str] = Counter()
            for client, _ in sides:
                strikes.update(client.ask("end"))
            tallies = self._honest.ask("pause", 2 * DEADLINE_SECONDS) if honest else {}
        return Outcome(
            seconds=took,
            strikes=strikes,
            refused=Counter(after["counters"]) - Counter(before["counters"]),
            cpu_seconds=after["cpu_seconds"] - before["cpu_seconds"],
            highest_bytes=highest(),
            tallies=tallies,
        )

    @contextmanager
    def _highest(self) -> Iterator[Callable[[], int]]:
        """Yield the largest memory of the victim so far, measured at intervals."""
        found, over = [self.rss_bytes], threading.Event()

        def look() -> None:
            while not over.wait(SAMPLE_SECONDS):
                found[0] = max(found[0], self.rss_bytes)

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield lambda: found[0]
        finally:
            over.set()
            thread.join()


@contextmanager
def scene() -> Iterator[Scene]:
    """Yield a scene, and end all its processes afterwards."""
    with ExitStack() as stack:
        yield Scene(stack)


def _end(process: BaseProcess, line: Connection) -> None:
    line.close()
    process.join(ENDING_SECONDS)
    if process.is_alive():
        process.terminate()
        process.join(ENDING_SECONDS)
    if process.is_alive():
        process.kill()
    process.join()
    process.close()


def unused_port() -> int:
    """Return a free port for the beacons; the kernel chooses the node's own port."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
