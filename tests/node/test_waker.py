"""The wait for a core's deadline, in virtual time."""

from math import inf

import trio
from trio.testing import MockClock

from node.seams import RealClock
from node.waker import CoreGroup, Waker


class Core:
    def __init__(self, deadline: float) -> None:
        self.deadline = deadline

    def wake(self, now: float) -> float:
        self.deadline = now + 2.0
        return now


class Batch:
    """A core that answers with a list that contains its own deadline."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline

    def wake(self, now: float) -> list[float]:
        return [self.deadline]


def open_waker(deadline: float) -> tuple[Core, Waker]:
    core = Core(deadline)
    return core, Waker(RealClock(), lambda: core.deadline)


def wait(deadline: float, *calls: tuple[float, str, float]) -> tuple[float | None, float]:
    """Wait once. At the time of each call, set a deadline and then call `stir` or `hasten`.

    Return the result of the wait, and how long it lasted.
    """

    async def main() -> tuple[float | None, float]:
        start = trio.current_time()
        core, waker = open_waker(start + deadline)
        async with trio.open_nursery() as nursery:

            async def call(at: float, name: str, new: float) -> None:
                await trio.sleep_until(start + at)
                core.deadline = start + new
                getattr(waker, name)()

            for each in calls:
                nursery.start_soon(call, *each)
            found = await waker.wait()
            lasted = trio.current_time() - start
            nursery.cancel_scope.cancel()
        return (None if found is None else found - start), lasted

    return trio.run(main, clock=MockClock(autojump_threshold=0))


def test_wait_ends_at_the_deadline_and_returns_it() -> None:
    assert wait(3.0) == (3.0, 3.0)


def test_stir_ends_the_wait_if_there_is_no_deadline() -> None:
    assert wait(3.0, (1.0, "stir", 3.0)) == (None, 1.0)


def test_stir_at_a_past_deadline_wakes_the_core() -> None:
    assert wait(inf, (2.0, "stir", 1.0)) == (2.0, 2.0)


def test_hasten_moves_the_wait_to_an_earlier_deadline_only() -> None:
    assert wait(5.0, (1.0, "hasten", 2.0)) == (2.0, 2.0)
    assert wait(5.0, (1.0, "hasten", 9.0)) == (5.0, 5.0)


def test_a_group_wakes_all_its_cores_at_the_first_deadline() -> None:
    cores = [Batch(2.0), Batch(1.0), Batch(3.0)]
    group = CoreGroup(lambda: cores)
    assert group.deadline == 1.0
    assert group.wake(1.0) == [2.0, 1.0, 3.0]
    assert CoreGroup(list).deadline == inf


def test_run_wakes_the_core_at_each_deadline() -> None:
    async def main() -> list[float]:
        start = trio.current_time()
        core, waker = open_waker(start + 1.0)
        woken: list[float] = []

        with trio.move_on_after(6.0):
            await waker.run(core, lambda now: woken.append(now - start))
        return woken

    assert trio.run(main, clock=MockClock(autojump_threshold=0)) == [1.0, 3.0, 5.0]
