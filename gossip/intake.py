"""Processes the facts of large messages in slices, so that no message blocks the loop that drives the core.

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
"""Relative costs of reading a fact, about 5 us, and of checking its signature, 105 us."""
CHECK_COST = 20
SLICE_COST_MAX = 32 * CHECK_COST
"""Maximum cost of a slice: 3.5 ms, or 10 ms on a machine a third as fast, far below the limit of 50 ms per
step."""
SLICE_PAUSE_SECONDS = 0.005
"""Pause between two slices, which leaves more than half of the time to other work under any load."""
JOBS_MAX = 8
"""Maximum number of large messages being processed, one per sender: at most 13 MB of facts. If there are too
many, the largest is discarded."""


@dataclass(eq=False, slots=True)
class Job:
    """The facts of one message. `now` is the time of the current slice."""

    sender: PeerId
    facts: Sequence[Fact]
    synced: bool
    passed_on: bool
    now: float


class Intake:
    """The unfinished `jobs`. `begin` returns the steps of a job, as a generator that yields the cost of
    each."""

    __slots__ = ("_begin", "jobs")

    def __init__(self, begin: Callable[[Job], Generator[int]]) -> None:
        self._begin = begin
        self.jobs: deque[tuple[Job, Generator[int]]] = deque()

    def __len__(self) -> int:
        return len(self.jobs)

    def do(self, job: Job) -> bool:
        """Process a job; of a large job, only one slice. Return whether it is finished. Raises
        RemoteProtocolError."""
        steps = self._begin(job)
        if _slice(steps):
            return True
        if any(other.sender == job.sender for other, _ in self.jobs):
            return False  # it must wait for the sender's earlier facts
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
        """Discard all jobs."""
        self.jobs.clear()


def _slice(steps: Generator[int]) -> bool:
    """Process one slice. Return whether it was the last one."""
    left = SLICE_COST_MAX
    for cost in steps:
        left -= cost
        if left <= 0:
            return False
    return True
