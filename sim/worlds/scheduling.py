"""Runs trio under a virtual clock so that a seed determines a run, down to the order of tasks.

Trio deliberately shuffles the tasks that are ready at one instant, with its own generator, so two runs would
differ whenever events coincide. A private switch made for hypothesis (`trio._core._run`) avoids this: ready
tasks are sorted by creation, then shuffled by a generator that can be seeded. Only this module sets the
switch. It restores the switch afterwards, and reports a newer trio that lacks it.

All order within an instant then depends only on the seed, and not on hash seeds, memory addresses, or garbage
collection.
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
    """Run like `run_virtually`; the same draws of `rng` give the same run."""
    with ordered(rng):
        return run_virtually(main)


@contextmanager
def ordered(rng: Random) -> Iterator[None]:
    """Make trio shuffle the tasks of one instant only by the draws of `rng`.

    Raises:
        LocalProtocolError: this version of trio lacks the switch.
    """
    names = vars(trio_run)
    if not isinstance(names.get(_SWITCH), bool) or not isinstance(names.get(_GENERATOR), Random):
        raise LocalProtocolError(
            f"trio {trio.__version__} lacks the switch for deterministic scheduling "
            "that sim/worlds/scheduling.py needs"
        )
    before = names[_SWITCH], names[_GENERATOR]
    names[_SWITCH], names[_GENERATOR] = True, rng
    try:
        yield
    finally:
        names[_SWITCH], names[_GENERATOR] = before
