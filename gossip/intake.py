"""Incoming facts of large messages, processed in slices, so that no message blocks the loop that drives the
core.

A Sync may hold thousands of facts, and a signature check takes 0.1 ms. Facts beyond one slice wait for the
next wakes; senders take turns. Not here: the meaning of a fact (`gossip.state_table`).
"""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from crypto.errors import RemoteProtocolError
from crypto.facts import Fact
from crypto.identity import PeerId

READ_COST = 1
"""Cost of reading a fact, some 5 us, and of checking its signature, 105 us."""
CHECK_COST = 20
SLICE_COST_MAX = 32 * CHECK_COST
"""Length of a slice: 3.5 ms, or 10 on a machine a third as fast, far below the limit of 50 ms a step."""
SLICE_PAUSE_SECONDS = 0.005
"""Pause between two slices, so that other work gets more than half of the time under any load."""
JOBS_MAX = 8
"""Large messages at once, one per sender: at most 13 MB of facts. The largest makes room."""


@dataclass(eq=False, slots=True)
class Job:
    """One message's facts. `now` is the time of the present slice."""

    sender: PeerId
    facts: Sequence[Fact]
    synced: bool
    passed_on: bool
    now: float


class Intake:
    """Unfinished `jobs`. `begin` returns a job's steps: a generator of the cost of each."""

    __slots__ = ("_begin", "jobs")

    def __init__(self, begin: Callable[[Job], Generator[int]]) -> None:
        self._begin = begin
        self.jobs: deque[tuple[Job, Generator[int]]] = deque()

    def __len__(self) -> int:
        return len(self.jobs)

    def do(self, job: Job) -> bool:
        """Process a job, a large one for one slice only; return whether it is finished. Raises
        RemoteProtocolError."""
        steps = self._begin(job)
        if _slice(steps):
            return True
        if any(other.sender == job.sender for other, _ in self.jobs):
            return False  # it waits its turn behind the sender's earlier facts
        self.jobs.append((job, steps))
        if len(self.jobs) > JOBS_MAX:
            self.jobs.remove(max(self.jobs, key=lambda row: len(row[0].facts)))
        return False

    def go_on(self, now: float) -> tuple[Job | None, RemoteProtocolError | None]:
        """Process one slice of the next job. Return the job if it is finished, and its error if it failed."""
        if not self.jobs:
            return None, None
        job, steps = self.jobs.popleft()
        job.now = now
        try:
            if _slice(steps):
                return job, None
        except RemoteProtocolError as error:
            return job, error
        self.jobs.append((job, steps))
        return None, None

    def clear(self) -> None:
        """Drop all jobs."""
        self.jobs.clear()


def _slice(steps: Generator[int]) -> bool:
    """Process one slice; return whether it was the last."""
    left = SLICE_COST_MAX
    for cost in steps:
        left -= cost
        if left <= 0:
            return False
    return True
