"""Waits for a core's deadline on behalf of the task that drives the core.

`node.services.driver` also waits for datagrams, so it waits at its inbox. Every other driver waits here: no
other file of `node` calls a core's `wake`.
"""

from collections.abc import Callable, Iterable
from math import inf
from typing import Generic, NoReturn, Protocol, TypeVar

import trio

from node.seams import Clock

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Woken(Protocol[T_co]):
    """A core that can be woken."""

    def wake(self, now: float) -> T_co: ...


class Timed(Woken[T_co], Protocol[T_co]):
    """A core with a `deadline`: the time at which it wants to be woken."""

    @property
    def deadline(self) -> float: ...


class CoreGroup(Generic[T]):
    """Several cores that are woken together, in order; `cores` returns the current cores."""

    def __init__(self, cores: Callable[[], Iterable[Timed[Iterable[T]]]]) -> None:
        self._cores = cores

    @property
    def deadline(self) -> float:
        """The earliest deadline of the cores; inf if none has one."""
        return min((core.deadline for core in self._cores()), default=inf)

    def wake(self, now: float) -> list[T]:
        """Wake each core. Return all their answers in one list."""
        return [each for core in list(self._cores()) for each in core.wake(now)]


class Waker:
    """Lets one task wait. `deadline` returns the monotonic time at which the core wants to be woken; inf for
    never."""

    def __init__(self, clock: Clock, deadline: Callable[[], float]) -> None:
        self._clock = clock
        self._deadline = deadline
        self._sleep = trio.CancelScope()
        self._until = inf
        self._is_stirred = False

    def stir(self) -> None:
        """End the wait, because the core was called or the task has other work. This has no effect while
        nobody waits, so a task must check its queues before it waits."""
        self._is_stirred = True
        self._sleep.cancel()

    def hasten(self) -> None:
        """Shorten the wait if the deadline has become earlier. Cheaper than `stir`."""
        deadline = self._deadline()
        if deadline < self._until:
            self._until = self._sleep.deadline = deadline

    async def wait(self) -> float | None:
        """Wait for the deadline. Return the time to wake the core with, or None if `stir` came first.

        The clock may round to a time before the deadline; the returned time is never earlier than the
        deadline.
        """
        self._is_stirred, self._until = False, self._deadline()
        with trio.CancelScope(deadline=self._until) as self._sleep:
            await trio.sleep_forever()
        now = self._clock.monotonic()
        if not self._is_stirred:
            return max(now, self._until)
        return now if self._deadline() <= now else None

    async def wake_when_due(self, core: Woken[T]) -> T | None:
        """Wait for the deadline and wake the core. Return the core's answer, or None if `stir` came first."""
        now = await self.wait()
        return None if now is None else core.wake(now)

    async def run(self, core: Woken[T], act: Callable[[T], object]) -> NoReturn:
        """Wake the core at each deadline and call `act` with its answer, until cancelled."""
        while True:
            now = await self.wait()
            if now is not None:
                act(core.wake(now))
