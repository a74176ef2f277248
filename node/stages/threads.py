"""Chooses a stage's number of threads by measuring, and again when its machine gets busy.

If the machine does other work, a small stage is faster on one thread than on two that wait for each other; a
large stage on an idle machine is faster on several. Between two steps a different number is tried for one
step. The costlier a trial of a number, the more rarely it is tried. The number is constant within a step, so
that a repeated computation gives the same result.
"""

from collections.abc import Callable, Sequence

from partition.stage import Apply, Backward, Forward, Reply, Request

TRIAL_SHARE = 0.05
"""Maximum cost of a trial, beyond the best number's time, as a share of the time since the number was last
tried."""
TRIAL_STEPS_MIN = 20
BETTER_SHARE = 0.9
"""A different number must take at most this share of the time to be adopted; smaller gains are noise."""
EWMA_SHARE = 0.5
"""Weight of the newest step in the moving average for the number in use."""


def candidates(most: int) -> tuple[int, ...]:
    """Return the numbers of threads worth trying if `most` are allowed, the largest first."""
    halves = {most, most // 2, most // 4, 1}
    return tuple(sorted((number for number in halves if number), reverse=True))


class ThreadChooser:
    """Chooses the number of threads from step times; `threads` is the number for the next step."""

    def __init__(self, numbers: Sequence[int]) -> None:
        """`numbers` may be tried; the first is used until more is known."""
        self.threads = self._home = numbers[0]
        self._seconds: dict[int, float | None] = dict.fromkeys(numbers)
        self._since: dict[int, float] = dict.fromkeys(numbers, 0.0)
        self._steps = 0

    def stepped(self, seconds: float, passes: int) -> None:
        """Record the seconds of a step with `threads`, in which this many passes of micro-batches were
        computed."""
        self._steps += 1
        if not passes or self._steps == 1:  # the first step loads libraries
            return
        found, before = seconds / passes, self._seconds[self.threads]
        if before is not None and self.threads == self._home:
            found = before + EWMA_SHARE * (found - before)
        self._seconds[self.threads] = found
        for number in self._since:
            self._since[number] += seconds
        self._since[self.threads] = 0.0
        self._settle()
        self.threads = self._trial(passes, seconds)

    def _settle(self) -> None:
        """Adopt the best number found, if it is clearly better than the number in use."""
        known = {number: seconds for number, seconds in self._seconds.items() if seconds is not None}
        best = min(known, key=lambda number: known[number])
        if known[best] < BETTER_SHARE * known.get(self._home, float("inf")):
            self._home = best

    def _trial(self, passes: int, step_seconds: float) -> int:
        """Return a number whose time is unknown, or that was not tried for long enough; else the number in
        use."""
        home = self._seconds[self._home]
        for number, seconds in self._seconds.items():
            if number == self._home or home is None:
                continue
            if seconds is None:
                return number
            lost = max(0.0, seconds - home) * passes
            if self._since[number] >= max(lost / TRIAL_SHARE, TRIAL_STEPS_MIN * step_seconds):
                return number
        return self._home


def adaptive(
    handle: Callable[[Request], Reply],
    chooser: ThreadChooser,
    *,
    set_threads: Callable[[int], None],
    clock: Callable[[], int],
) -> Callable[[Request], Reply]:
    """Wrap `handle` so that it uses the chooser's number of threads and reports step times, measured by a
    clock of nanoseconds."""
    spent, passes = 0, 0

    def handled(request: Request) -> Reply:
        nonlocal spent, passes
        begun = clock()
        reply = handle(request)
        match request:
            case Forward(train=True) | Backward():
                spent, passes = spent + clock() - begun, passes + 1
            case Apply():
                before = chooser.threads
                chooser.stepped(spent / 1e9, passes)
                spent, passes = 0, 0
                if chooser.threads != before:
                    set_threads(chooser.threads)
        return reply

    return handled
