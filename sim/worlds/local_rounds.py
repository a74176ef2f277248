"""The averaging rounds of a simulated run in local mode: formed by members that want a round at the same time
and reach each other.

Not here: when a round is due, and groups with their arithmetic, which have their own cores.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

from crypto.identity import PeerId

ROUND_SECONDS = 0.3
PATIENCE_SECONDS = 60.0


@dataclass(frozen=True, eq=False)
class RoundTurn:
    """A member that wants a round. `awaited` returns the members that it expects. `over` is called with the
    number of members in the mean, or 1 if there was no mean."""

    peer: PeerId
    window: float
    awaited: Callable[[], Collection[PeerId]]
    is_over: Callable[[], bool]
    over: Callable[[int], None]


class RoundTable:
    """The rounds of all stages of one run."""

    def __init__(
        self,
        now: Callable[[], float],
        sleep: Callable[[float, Callable[[Any], None]], None],
        connected: Callable[[PeerId, PeerId], bool],
    ) -> None:
        self._now = now
        self._sleep = sleep
        self._connected = connected
        self._waiting: dict[int, list[tuple[float, RoundTurn]]] = {}

    def want(self, stage: int, turn: RoundTurn) -> None:
        """Find a group with the other holders of a stage."""
        self._waiting.setdefault(stage, []).append((self._now(), turn))
        for seconds in (0.0, turn.window, PATIENCE_SECONDS):
            self._sleep(seconds, lambda _: self._look(stage))

    def _look(self, stage: int) -> None:
        now = self._now()
        rows = [row for row in self._waiting.get(stage, ()) if not row[1].is_over()]
        while rows:
            begun, first = rows[0]
            group = [row for row in rows if row[1] is first or self._connected(first.peer, row[1].peer)]
            awaited = set(first.awaited()) - {turn.peer for _, turn in group}
            is_time = not awaited or any(now >= at + turn.window for at, turn in group)
            if len(group) > 1 and is_time:
                self._sleep(ROUND_SECONDS, partial(self._end, [turn for _, turn in group]))
            elif now >= begun + PATIENCE_SECONDS:
                first.over(1)
                group = rows[:1]
            else:
                break
            rows = [row for row in rows if row not in group]
        self._waiting[stage] = rows

    def _end(self, group: list[RoundTurn], _: object) -> None:
        present = [turn for turn in group if not turn.is_over()]
        for turn in present:
            turn.over(len(present))
