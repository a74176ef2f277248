"""A free lock is acquired without yielding to other tasks, and a cancelled task never acquires a lock."""

import trio
import trio.testing

from node.locks import Turn, acquire


async def _take(lock: trio.Lock, order: list[str], name: str) -> None:
    await acquire(lock)
    order.append(name)
    await trio.lowlevel.checkpoint()
    lock.release()


def test_a_free_lock_is_acquired_before_other_tasks_run() -> None:
    async def main() -> None:
        lock, order = trio.Lock(), list[str]()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_other, order)
            await acquire(lock)
            order.append("mine")
            lock.release()
        assert order == ["mine", "other"]

    async def _other(order: list[str]) -> None:
        order.append("other")

    trio.run(main)


def test_a_held_lock_is_passed_on_in_the_order_of_waiting() -> None:
    async def main() -> None:
        lock, order = trio.Lock(), list[str]()
        async with trio.open_nursery() as nursery:
            await acquire(lock)
            for name in "abc":
                nursery.start_soon(_take, lock, order, name)
                await trio.testing.wait_all_tasks_blocked()
            lock.release()
        assert order == ["a", "b", "c"]

    trio.run(main)


def test_a_cancelled_task_does_not_keep_a_lock() -> None:
    async def main() -> None:
        lock = trio.Lock()
        with trio.CancelScope() as scope:
            scope.cancel()
            await acquire(lock)
        assert scope.cancelled_caught
        assert not lock.locked()

    trio.run(main)


def test_waiting_tasks_get_the_lock_in_order_despite_cancelled_ones() -> None:
    async def main() -> None:
        turn, order = Turn(), list[int]()
        scopes = [trio.CancelScope() for _ in range(4)]

        async def take(number: int) -> None:
            with scopes[number]:
                await turn.take()
                order.append(number)
                turn.give()

        await turn.take()
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(take, number)
                await trio.testing.wait_all_tasks_blocked()
            scopes[1].cancel()
            await trio.testing.wait_all_tasks_blocked()
            # The task gets the lock and is cancelled at the same moment. The lock passes to the next task.
            scopes[0].cancel()
            turn.give()
            scopes[2].cancel()
        assert order == [3]
        assert not turn.is_taken
        with trio.CancelScope() as scope:
            scope.cancel()
            await turn.take()
        assert scope.cancelled_caught
        assert not turn.is_taken

    trio.run(main)
