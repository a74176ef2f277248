"""Waits for a core's deadline on behalf of the task that drives the core.

`node.services.driver` waits for datagrams as well, so it waits at its inbox. Every other driver waits here:
no other file of `node` calls a core's `wake`.
"""

from collections.abc import Callable, Iterable
from math import inf
from typing import Generic, NoReturn, Protocol, TypeVar

import trio

from node.seams import Clock

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Woken(Protocol[T_co]):
    """A core that is woken."""

    def wake(self, now: float) -> T_co: ...


class Timed(Woken[T_co], Protocol[T_co]):
    """A core, with the time at which it wants to be woken."""

    @property
    def deadline(self) -> float: ...


class CoreGroup(Generic[T]):
    """Several cores that are woken as one, in their order; `cores` says which they are now."""

    def __init__(self, cores: Callable[[], Iterable[Timed[Iterable[T]]]]) -> None:
        self._cores = cores

    @property
    def deadline(self) -> float:
        """When the first of them wants to be woken; inf for never."""
        return min((core.deadline for core in self._cores()), default=inf)

    def wake(self, now: float) -> list[T]:
        """Wake each. Return what they answer, one after the other."""
        return [each for core in list(self._cores()) for each in core.wake(now)]


class Waker:
    """One task waits. `deadline` returns when the core wants to be woken, in monotonic seconds; inf for
    never."""

    def __init__(self, clock: Clock, deadline: Callable[[], float]) -> None:
        self._clock = clock
        self._deadline = deadline
        self._sleep = trio.CancelScope()
        self._until = inf
        self._is_stirred = False

    def stir(self) -> None:
        """End the wait: the core was called, or the task has other work. It has no effect while nobody waits,
        so a task looks at its queues before it waits."""
        self._is_stirred = True
        self._sleep.cancel()

    def hasten(self) -> None:
        """Shorten the wait where the deadline has become earlier. Cheaper than `stir`."""
        deadline = self._deadline()
        if deadline < self._until:
            self._until = self._sleep.deadline = deadline

    async def wait(self) -> float | None:
        """Wait for the deadline. Return the time to wake the core with, or None if `stir` came first.

        The clock may round to a time before the deadline; the time that is returned never lies before it.
        """
        self._is_stirred, self._until = False, self._deadline()
        with trio.CancelScope(deadline=self._until) as self._sleep:
            await trio.sleep_forever()
        now = self._clock.monotonic()
        if not self._is_stirred:
            return max(now, self._until)
        return now if self._deadline() <= now else None

    async def wake_when_due(self, core: Woken[T]) -> T | None:
        """Wait for the deadline and wake the core. Return what it answers, or None if `stir` came first."""
        now = await self.wait()
        return None if now is None else core.wake(now)

    async def run(self, core: Woken[T], act: Callable[[T], object]) -> NoReturn:
        """Wake the core at each deadline and `act` on what it answers, until cancelled."""
        while True:
            now = await self.wait()
            if now is not None:
                act(core.wake(now))
