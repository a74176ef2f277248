"""Incoming facts of large messages, taken in a slice at a time: no message blocks the loop that drives the
core.

A Sync may hold thousands of facts, and to check one signature takes 0.1 ms. Facts beyond one slice wait here
for the next wakes; senders take turns. Not here: what a fact means (`gossip.state_table`).
"""

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from crypto.errors import RemoteProtocolError
from crypto.facts import Fact
from crypto.identity import PeerId

READ_COST = 1
"""To read a fact takes some 5 us, and to check its signature 105 us."""
CHECK_COST = 20
SLICE_COST_MAX = 32 * CHECK_COST
"""3.5 ms, or 10 on a machine a third as fast: well below the 50 ms that no step may take."""
SLICE_PAUSE_SECONDS = 0.005
"""Between two slices, so that others get more than half of the time however much is sent."""
JOBS_MAX = 8
"""Large messages at once, one of a sender: 13 MB of facts at most. The largest makes room."""


@dataclass(eq=False, slots=True)
class Job:
    """One message's facts. `now` is the time of the present slice."""

    sender: PeerId
    facts: Sequence[Fact]
    synced: bool
    passed_on: bool
    now: float


class Intake:
    """`jobs` that are not done. `begin` makes a job's steps: a generator of what each cost."""

    __slots__ = ("_begin", "jobs")

    def __init__(self, begin: Callable[[Job], Generator[int]]) -> None:
        self._begin = begin
        self.jobs: deque[tuple[Job, Generator[int]]] = deque()

    def __len__(self) -> int:
        return len(self.jobs)

    def do(self, job: Job) -> bool:
        """Do a job, a large one for one slice only; return whether it is done. Raises RemoteProtocolError."""
        steps = self._begin(job)
        if _slice(steps):
            return True
        if any(other.sender == job.sender for other, _ in self.jobs):
            return False  # it is to wait its turn, with what it has said before
        self.jobs.append((job, steps))
        if len(self.jobs) > JOBS_MAX:
            self.jobs.remove(max(self.jobs, key=lambda row: len(row[0].facts)))
        return False

    def go_on(self, now: float) -> tuple[Job | None, RemoteProtocolError | None]:
        """Do one slice of the job whose turn it is. Return the job if it is over, and its error if it
        failed."""
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
        """Forget all."""
        self.jobs.clear()


def _slice(steps: Generator[int]) -> bool:
    """Do one slice; return whether it was the last."""
    left = SLICE_COST_MAX
    for cost in steps:
        left -= cost
        if left <= 0:
            return False
    return True
