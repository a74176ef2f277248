"""Limits on a stage's process in memory and time, and a watch on the process while an answer is due.

The limits follow from the specification, above all from `memory_bytes_max`, the provider's offer. On Linux
the process limits its own memory (`node.stages.sandbox`), so that an allocation fails inside it. On other
systems only the watch limits memory. On all systems the watch is the only limit on a process that hangs or
computes forever. The times are long enough for a correct stage on a bad machine.
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
"""Time limit for loading torch, which takes five seconds on a busy machine."""
ANSWER_SECONDS = 60.0
"""Time added to the work of each answer, because the machine may be busy with something else."""
SLOW_FLOPS_PER_SECOND = 5e7
"""Assumed minimum computing rate; a slower stage counts as frozen. A core of a small board is a hundred times
as fast."""
SLOW_BYTES_PER_SECOND = 2e7
"""Assumed minimum rate of filling, copying or hashing arenas; their memory may be swapped to a slow disk."""
SLOW_NODES_PER_SECOND = 20.0
"""Assumed minimum number of graph nodes admitted per second; an idle machine checks some hundreds."""
STALLED_SECONDS = 30.0
"""If a process uses no CPU time for this long although an answer is due, it counts as stopped or stuck."""
WATCH_SECONDS = 0.25
"""Seconds between checks of a process from which an answer is due (100 us each). Between two checks, its
memory can grow by a GB or two."""
PROCESS_BYTES = 256 << 20
"""Memory allowed in addition to tensors: for modules loaded late, the interpreter's objects and
fragmentation."""
HEAP_SLACK = 8
"""Divisor of a further share, which is allowed for unused memory between allocated pieces of the heap."""
GRAPH_FACTOR = 256
"""Bytes of objects per byte of an encoded graph, in the dry run and the interpreter; 140 were measured."""
GRAPH_MEMORY_BYTES_MAX = 1 << 30
"""Maximum memory for a graph, more than any admitted graph takes; a meaningless graph with many nodes must
fail early."""
THREAD_BYTES = 16 << 20
"""Memory for a thread's stack and its part of the heap."""
LIBRARIES_BYTES = {"cpu": 768 << 20}
"""Memory of the process before the specification; Python and torch take 0.25 GB."""
LIBRARIES_BYTES_ACCELERATOR = 6 << 30
"""Memory for an accelerator's libraries and the driver's mirror of its memory."""


@dataclass(frozen=True)
class Allowance:
    """The limits of one stage's process, so that the node need not keep the graph.

    `arenas` has the arenas' sizes by name. `payload_bytes_max` is the size of the tensors in one request or
    one answer, which are in shared memory. `own_bytes` is the memory that the process may use in addition to
    these and its initial memory. `start_seconds` is how long it may take until it is ready. `allow_unfenced`
    lets it run without the fences that this system lacks.
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
        """Maximum memory of the process without the arenas."""
        return self.own_bytes + LIBRARIES_BYTES.get(self.device, LIBRARIES_BYTES_ACCELERATOR)

    def answer_seconds(self, admitted: Admitted) -> float:
        """Return the time limit of an answer, which is longer than any useful stage needs."""
        moved = sum(self.arenas.values()) + self.message_bytes_max
        return ANSWER_SECONDS + admitted.flops / SLOW_FLOPS_PER_SECOND + moved / SLOW_BYTES_PER_SECOND


def allowance_of(specification: StageSpecification, encoded_bytes: int) -> Allowance:
    """Return the limits of a process for this stage; `encoded_bytes` is the length of its specification.

    `own_bytes` is `memory_bytes_max` minus the arenas, plus memory that no plan counts: for one request with
    its answer, each of which exists up to three times (received, decoded, as tensors), and for the process
    itself.
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
    """Checks a process at intervals while an answer is due, and decides when to stop waiting."""

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
        """Start the watch: an answer is due within `seconds`. `what` completes the error "the stage's process
        ... within"."""
        now = trio.current_time()
        self._complaint = f"the stage's process {what} within {seconds:g} s"
        self._until = now + seconds
        self._busy_seconds = -1.0
        self._busy_at = now

    async def wait(self, ready: Callable[[socket.socket], Awaitable[None]], link: socket.socket) -> None:
        """Wait until `link` is `ready`. Raises StageFailed if waiting is useless."""
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
            return  # the process has ended, which the link will show
        busy = times.user + times.system
        if busy > self._busy_seconds:
            self._busy_seconds, self._busy_at = busy, now
        elif now - self._busy_at >= self._stalled_seconds:
            raise StageFailed(f"the stage's process has done nothing for {self._stalled_seconds:g} s")
        # If the system reports shared memory: arenas and libraries are shared, and the rest is the process's
        # own.
        own = memory.rss - getattr(memory, "shared", 0)
        if own > self._bytes_max:
            raise StageFailed(
                f"the stage's process took {own >> 20} MiB, at most {self._bytes_max >> 20} allowed"
            )
