"""Bounds on a stage's process in memory and time, and the watch on it while it owes an answer.

The bounds follow from the specification, above all from `memory_bytes_max`, the provider's offer. On Linux
the process limits its own memory (`node.stages.sandbox`), so that an allocation fails inside it. Elsewhere
only the watch bounds memory; it is everywhere the only bound on a process that stands still or never ends.
Times are long enough for a correct stage on a bad machine.
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
"""The time limit for loading torch, which alone takes five seconds on a busy machine."""
ANSWER_SECONDS = 60.0
"""The time added to each answer's work: the machine may be busy with something else."""
SLOW_FLOPS_PER_SECOND = 5e7
"""A core of a small board is a hundred times as fast. Anything slower than this counts as frozen."""
SLOW_BYTES_PER_SECOND = 2e7
"""The rate of filling, copying or hashing arenas whose memory was swapped to a slow disk."""
SLOW_NODES_PER_SECOND = 20.0
"""Nodes of a graph admitted per second: an idle machine checks some hundreds."""
STALLED_SECONDS = 30.0
"""How long a process that owes an answer may use no processor time: it is stopped, or stuck."""
WATCH_SECONDS = 0.25
"""The interval of looks at a process that owes an answer (100 us each). Memory grows by a GB or two
between."""
PROCESS_BYTES = 256 << 20
"""In addition to tensors: modules loaded late, the interpreter's objects and fragmentation."""
HEAP_SLACK = 8
"""The divisor of a further share: unused memory between a heap's pieces, which also counts."""
GRAPH_FACTOR = 256
"""The bytes of objects for each byte of an encoded graph, in the dry run and the interpreter: 140 were
measured."""
GRAPH_MEMORY_BYTES_MAX = 1 << 30
"""More than any admitted graph takes; a senseless graph of many nodes must fail early."""
THREAD_BYTES = 16 << 20
"""A thread's stack and its part of the heap."""
LIBRARIES_BYTES = {"cpu": 768 << 20}
"""Memory of the process before the specification: Python and torch take 0.25 GB."""
LIBRARIES_BYTES_ACCELERATOR = 6 << 30
"""An accelerator's libraries and the driver's mirror of its memory."""


@dataclass(frozen=True)
class Allowance:
    """The bounds of one stage's process, so that the node need not keep the graph.

    `arenas` gives their bytes by name; `payload_bytes_max` is the size of the tensors in one request or one
    answer, which go through shared memory; `own_bytes` is the memory that the process may take besides these
    and its initial memory; `start_seconds` is how long it may take to be ready; `allow_unfenced` lets it run
    without the fences that this system lacks.
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
        """Return the most memory that the process may hold, without the arenas."""
        return self.own_bytes + LIBRARIES_BYTES.get(self.device, LIBRARIES_BYTES_ACCELERATOR)

    def answer_seconds(self, admitted: Admitted) -> float:
        """Return how long an answer may take: more than any useful stage needs."""
        moved = sum(self.arenas.values()) + self.message_bytes_max
        return ANSWER_SECONDS + admitted.flops / SLOW_FLOPS_PER_SECOND + moved / SLOW_BYTES_PER_SECOND


def allowance_of(specification: StageSpecification, encoded_bytes: int) -> Allowance:
    """Return what a process for this stage may take; `encoded_bytes` is the length of its specification.

    `own_bytes` is `memory_bytes_max` minus the arenas, plus memory that no plan counts: one request with its
    answer, each of which exists up to three times (received, decoded, as tensors), and the process itself.
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


class ProcessWatch:
    """Looks at a process that owes an answer at intervals, and decides when to stop waiting."""

    def __init__(
        self, pid: int, bytes_max: int, stalled_seconds: float, count_files: Callable[[], None]
    ) -> None:
        """`count_files` raises StageFailed if the process has written too much."""
        self._process = psutil.Process(pid)
        self._count_files = count_files
        self._bytes_max = bytes_max
        self._stalled_seconds = stalled_seconds
        self.begin(0.0, "")

    def begin(self, seconds: float, what: str) -> None:
        """Start the watch: an answer is owed from now on, for at most `seconds`."""
        now = trio.current_time()
        self._complaint = f"the stage's process {what} within {seconds:g} s"
        self._until = now + seconds
        self._busy_seconds = -1.0
        self._busy_at = now

    async def wait(self, ready: Callable[[socket.socket], Awaitable[None]], link: socket.socket) -> None:
        """Wait until `ready` to go on with `link`. Raises StageFailed if waiting is useless."""
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
            return  # it has ended, which the link will show
        busy = times.user + times.system
        if busy > self._busy_seconds:
            self._busy_seconds, self._busy_at = busy, now
        elif now - self._busy_at >= self._stalled_seconds:
            raise StageFailed(f"the stage's process has done nothing for {self._stalled_seconds:g} s")
        # Where the system counts them: arenas and libraries are shared, the rest is its own.
        own = memory.rss - getattr(memory, "shared", 0)
        if own > self._bytes_max:
            raise StageFailed(
                f"the stage's process took {own >> 20} MiB, at most {self._bytes_max >> 20} allowed"
            )
