"""What a stage's process may take of memory and time, and the eye that is kept on it while it owes an answer.

The bounds follow from the specification, above all from `memory_bytes_max`, which is what the provider
offers. On Linux the process holds itself to its memory (`node.stages.sandbox`), so that an allocation fails
inside it; the watch is what remains elsewhere, and the only fence against a process that stands still or
never ends. Times are so long that a correct stage on a bad machine keeps them.
"""

import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import psutil
import trio

from node.errors import StageFailed
from partition.stage import Admitted, StageSpecification
from partition.stage_layout import arena_bytes, message_bytes_max, payload_bytes_max

START_SECONDS = 60.0
"""Until the process has loaded torch, which alone takes five seconds on a busy machine."""
ANSWER_SECONDS = 60.0
"""For any answer, on top of what its work takes: a machine may be busy with something else."""
SLOW_FLOPS_PER_SECOND = 5e7
"""A core of a small board does a hundred times as much. Slower than this is as good as frozen."""
SLOW_BYTES_PER_SECOND = 2e7
"""The rate at which arenas are filled, copied or hashed: memory that has gone to a slow disk."""
SLOW_NODES_PER_SECOND = 20.0
"""The nodes of a graph admitted in a second: a machine with nothing else to do looks through some
hundreds."""
STALLED_SECONDS = 30.0
"""How long a process that owes an answer may take no processor time: it is stopped, or stuck."""
WATCH_SECONDS = 0.25
"""How often a process that owes an answer is looked at (100 us each). Memory grows by a GB or two between."""
PROCESS_BYTES = 256 << 20
"""On top of tensors: what is loaded late, the interpreter's objects and what lies between them."""
HEAP_SLACK = 8
"""One part in so many more: what lies unused between a heap's pieces, and counts all the same."""
GRAPH_FACTOR = 256
"""A byte of an encoded graph as objects, the dry run's and the interpreter's: 140 were measured."""
GRAPH_MEMORY_BYTES_MAX = 1 << 30
"""More than any graph takes that is admitted; one that is all nodes and no sense is to fail early."""
THREAD_BYTES = 16 << 20
"""A thread's stack and its part of the heap."""
LIBRARIES_BYTES = {"cpu": 768 << 20}
"""What the process has before the specification: Python and torch take 0.25 GB."""
LIBRARIES_BYTES_ACCELERATOR = 6 << 30
"""An accelerator's libraries and the driver's mirror of its memory."""


@dataclass(frozen=True)
class Allowance:
    """For one stage's process. The graph itself the node need not keep.

    `arenas` are their bytes by name; `payload_bytes_max` is the most of tensors in one request or in one
    answer, which go through memory that both sides share; `own_bytes` is what the process may take besides
    all these and what it has before it begins; `start_seconds` is how long it may take to be ready;
    `allow_unfenced` lets it run without the fences that this system lacks.
    """

    arenas: dict[str, int]
    message_bytes_max: int
    payload_bytes_max: int
    own_bytes: int
    threads: int
    device: str
    start_seconds: float
    allow_unfenced: bool = False

    @property
    def watched_bytes(self) -> int:
        """The most that the process may hold, the arenas not counted."""
        return self.own_bytes + LIBRARIES_BYTES.get(self.device, LIBRARIES_BYTES_ACCELERATOR)

    def answer_seconds(self, admitted: Admitted) -> float:
        """Return how long an answer may take: more than any stage needs that still is of use."""
        moved = sum(self.arenas.values()) + self.message_bytes_max
        return ANSWER_SECONDS + admitted.flops / SLOW_FLOPS_PER_SECOND + moved / SLOW_BYTES_PER_SECOND


def allowance_of(specification: StageSpecification, encoded_bytes: int) -> Allowance:
    """Return what a process for this stage may take; `encoded_bytes` is the length of its specification.

    `own_bytes` is what the arenas leave over of `memory_bytes_max`. On top comes what no plan counts: one
    request with its answer, each of which exists up to three times (received, decoded, as tensors), and the
    process itself.
    """
    arenas = arena_bytes(specification)
    size = sum(arenas.values())
    left = max(0, specification.memory_bytes_max - size)
    longest = message_bytes_max(specification)
    constants = sum(len(constant.data) for constant in specification.graph.constants)
    overhead = (
        PROCESS_BYTES
        + specification.threads * THREAD_BYTES
        + 3 * longest
        + min(GRAPH_FACTOR * max(0, encoded_bytes - constants), GRAPH_MEMORY_BYTES_MAX)
    )
    return Allowance(
        arenas=arenas,
        message_bytes_max=longest,
        payload_bytes_max=payload_bytes_max(specification),
        own_bytes=left + left // HEAP_SLACK + overhead,
        threads=specification.threads,
        device=specification.device,
        start_seconds=START_SECONDS
        + sum(len(entry.nodes) for entry in specification.graph.entries) / SLOW_NODES_PER_SECOND
        + size / SLOW_BYTES_PER_SECOND,
        allow_unfenced=specification.allow_unfenced,
    )


class Watch:
    """Looks at a process that owes an answer, now and then, and says when there is no sense in waiting."""

    def __init__(
        self, pid: int, bytes_max: int, stalled_seconds: float, count_files: Callable[[], None]
    ) -> None:
        """`count_files` raises StageFailed where the process has written too much."""
        self._process = psutil.Process(pid)
        self._count_files = count_files
        self._bytes_max = bytes_max
        self._stalled_seconds = stalled_seconds
        self.begin(0.0, "")

    def begin(self, seconds: float, what: str) -> None:
        """An answer is owed from now on, for at most `seconds`."""
        now = trio.current_time()
        self._complaint = f"the stage's process {what} within {seconds:g} s"
        self._until = now + seconds
        self._busy_seconds = -1.0
        self._busy_at = now

    async def wait(self, ready: Callable[[socket.socket], Awaitable[None]], link: socket.socket) -> None:
        """Wait until `ready` to go on with `link`. Raises StageFailed: there is no sense in it."""
        while True:
            until = min(trio.current_time() + min(WATCH_SECONDS, self._stalled_seconds), self._until)
            with trio.move_on_at(until):
                await ready(link)
                return
            self._look()

    def _look(self) -> None:
        now = trio.current_time()
        if now >= self._until:
            raise StageFailed(self._complaint)
        self._count_files()
        try:
            with self._process.oneshot():
                times = self._process.cpu_times()
                memory = self._process.memory_info()
        except psutil.Error:
            return  # it has ended, which the link will tell
        busy = times.user + times.system
        if busy > self._busy_seconds:
            self._busy_seconds, self._busy_at = busy, now
        elif now - self._busy_at >= self._stalled_seconds:
            raise StageFailed(f"the stage's process has done nothing for {self._stalled_seconds:g} s")
        # Where the system counts it: arenas and libraries are shared, the rest is its own.
        own = memory.rss - getattr(memory, "shared", 0)
        if own > self._bytes_max:
            raise StageFailed(
                f"the stage's process took {own >> 20} MiB, at most {self._bytes_max >> 20} allowed"
            )
