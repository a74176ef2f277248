"""The agenda of a world: a heap of calls, sorted by instant and then by the order of scheduling."""

import math
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from sim.network.instants import instant


class Agenda:
    """Pending calls, sorted by instant."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._number = 0

    @property
    def due(self) -> float:
        """Return the instant of the first call; inf if there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        # The running number makes each entry unique, so that the fields after it are never compared.
        self._number += 1
        heappush(self._heap, (instant(time), self._number, action, arguments))

    def do_first(self) -> None:
        """Make the first call."""
        _, _, action, arguments = heappop(self._heap)
        action(*arguments)
