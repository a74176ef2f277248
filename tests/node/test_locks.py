"""A free lock costs no turn; a cancelled task never comes to hold one."""

import trio
import trio.testing

from node.locks import acquire


async def _take(lock: trio.Lock, order: list[str], name: str) -> None:
    await acquire(lock)
    order.append(name)
    await trio.lowlevel.checkpoint()
    lock.release()


def test_a_free_lock_is_taken_before_others_run() -> None:
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


def test_a_lock_that_is_held_is_handed_over_in_the_order_of_asking() -> None:
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
