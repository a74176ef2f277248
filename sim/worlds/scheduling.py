"""Trio under a virtual clock, so that the same seed is the same run, task by task.

Trio deliberately shuffles the tasks that are ready at one instant, by a generator of its own; two runs
therefore differ wherever events coincide. A private switch made for hypothesis (`trio._core._run`) avoids
this: ready tasks are sorted by their creation, then shuffled by a generator that can be seeded. Only this
file touches the switch; it restores it, and reports a newer trio that lacks it.

Within an instant everything then depends on the seed alone: not on the hash seed of the process, on addresses
in memory, or on when garbage is collected.
"""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import TypeVar

import trio
import trio._core._run as trio_run
import trio.testing

from crypto.errors import LocalProtocolError

T = TypeVar("T")

_SWITCH, _GENERATOR = "_ALLOW_DETERMINISTIC_SCHEDULING", "_r"


def run_virtually(main: Callable[[], Awaitable[T]]) -> T:
    """Run `trio.run` under a clock that jumps when every task waits. Tasks of one instant are shuffled."""

    async def whole() -> T:
        return await main()

    return trio.run(whole, clock=trio.testing.MockClock(autojump_threshold=0))


def run_repeatably(main: Callable[[], Awaitable[T]], rng: Random) -> T:
    """Run like `run_virtually`; the same draws of `rng` repeat the same run."""
    with ordered(rng):
        return run_virtually(main)


@contextmanager
def ordered(rng: Random) -> Iterator[None]:
    """Make trio shuffle the tasks of one instant by the draws of `rng` alone.

    Raises:
        LocalProtocolError: this trio hides its switch elsewhere.
    """
    names = vars(trio_run)
    if not isinstance(names.get(_SWITCH), bool) or not isinstance(names.get(_GENERATOR), Random):
        raise LocalProtocolError(
            f"trio {trio.__version__} hides its deterministic scheduling elsewhere: sim/worlds/scheduling.py"
        )
    before = names[_SWITCH], names[_GENERATOR]
    names[_SWITCH], names[_GENERATOR] = True, rng
    try:
        yield
    finally:
        names[_SWITCH], names[_GENERATOR] = before
