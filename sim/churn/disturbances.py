"""The `[[events]]` of a scenario, resolved to start times, end times and peer numbers. No I/O.

The affected peers are a keyed draw of (seed, the event's position in the list, its repetition, the peer's
number), so an added event does not change which peers the others affect. Exactly the given share is affected,
rounded, and at least one peer if the share is above 0. Permanent peers are never stopped, but they may be cut
off, frozen or slowed.

A disturbance also names peers that are down at that moment; a world skips them. Not here: sessions and
absences (`sim.churn.schedule`).
"""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from sim.churn.model import Churn, ChurnEvent
from sim.network.instants import nearest_instant
from sim.seeds import draw, draw_share

ENDLESS = ("crash", "leave")
"""The kinds that last for ever if `lasts_seconds` is 0."""
_STOPPING = ("crash", "leave", "restart")


@dataclass(frozen=True)
class Disturbance:
    """One event, for the peers `numbers` (ascending). `kind` is as in `ChurnEvent`.

    It lasts from `begins` to `ends` (inf: for ever). Then its peers start again, can be reached again, or
    compute at their normal pace. join: `numbers` start at `starts`, which has one instant for each. restart:
    `ends` equals `begins`, and the peers return with `version`.
    """

    begins: float
    ends: float
    kind: str
    numbers: tuple[int, ...]
    starts: tuple[float, ...] = ()
    factor: float = 1.0
    loss: float = 0.0
    version: str = ""


def late_numbers(nodes: int, late_share: float, permanent: int) -> range:
    """Return the peers kept back for events of kind `join`: the last ones in the list, excluding permanent
    ones."""
    return range(max(nodes - round(nodes * late_share), min(permanent, nodes)), nodes)


def disturbances(
    events: Sequence[ChurnEvent],
    *,
    nodes: int,
    seconds: float,
    seed: int,
    churn: Churn,
    late_share: float = 0.0,
    region_of: Callable[[int], str],
) -> Iterator[Disturbance]:
    """Yield all disturbances that begin before the instant `seconds`, ordered by start time, then by position
    in the list."""
    crowd = _Crowd(nodes, seed, churn, late_numbers(nodes, late_share, churn.permanent), region_of)
    # One queue, not a merge of streams, because the peers that an event affects depend on the events before
    # it.
    due = [(event.at_seconds, index, 0) for index, event in enumerate(events)]
    heapq.heapify(due)
    while due:
        at, index, repetition = heapq.heappop(due)
        if at >= seconds:
            return
        event = events[index]
        if event.every_seconds:
            following = event.at_seconds + (repetition + 1) * event.every_seconds
            heapq.heappush(due, (following, index, repetition + 1))
        found = crowd.resolve(event, nearest_instant(at), index, repetition)
        if found.numbers:
            yield found


def version_of(churn: Churn, number: int, seed: int) -> str:
    """Return the version of a peer at the start; "" if no versions are given, or if the peer is in the share
    without one."""
    share = draw_share(seed, "version", number)
    for version in churn.versions:
        share -= version.share
        if share < 0:
            return version.name
    return ""


class _Crowd:
    """All peers, with the facts that select those of an event: which have started so far, and which version
    each runs."""

    def __init__(
        self, nodes: int, seed: int, churn: Churn, late: range, region_of: Callable[[int], str]
    ) -> None:
        self._nodes = nodes
        self._seed = seed
        self._churn = churn
        self._waiting = dict.fromkeys(late)
        self._region_of = region_of
        self._versions: dict[int, str] = {}

    def resolve(self, event: ChurnEvent, at: float, index: int, repetition: int) -> Disturbance:
        candidates = [number for number in self._candidates(event) if self._fits(event, number)]
        ranks = {number: draw(self._seed, "event", index, repetition, number) for number in candidates}
        count = round(event.share * len(candidates)) or (1 if event.share > 0 else 0)
        numbers = tuple(sorted(sorted(candidates, key=ranks.__getitem__)[:count]))
        ends = nearest_instant(at + event.lasts_seconds)
        if event.kind in ENDLESS and not event.lasts_seconds:
            ends = math.inf
        if event.kind == "restart":
            ends = at
            if event.version:
                self._versions.update(dict.fromkeys(numbers, event.version))
        starts: tuple[float, ...] = ()
        if event.kind == "join":
            for number in numbers:
                del self._waiting[number]
            starts = tuple(self._start(event, at, index, repetition, number) for number in numbers)
        return Disturbance(
            begins=at,
            ends=ends,
            kind=event.kind,
            numbers=numbers,
            starts=starts,
            factor=event.factor if event.kind == "slow" else 1.0,
            loss=event.loss if event.kind == "loss" else 0.0,
            version=event.version,
        )

    def _start(self, event: ChurnEvent, at: float, index: int, repetition: int, number: int) -> float:
        share = draw_share(self._seed, "start", index, repetition, number)
        return nearest_instant(at + event.lasts_seconds * share)

    def _candidates(self, event: ChurnEvent) -> list[int]:
        if event.kind == "join":
            return list(self._waiting)
        first = self._churn.permanent if event.kind in _STOPPING else 0
        return [number for number in range(first, self._nodes) if number not in self._waiting]

    def _fits(self, event: ChurnEvent, number: int) -> bool:
        if event.regions and self._region_of(number) not in event.regions:
            return False
        if not event.versions and not (event.kind == "restart" and event.version):
            return True
        runs = self._versions.get(number)
        if runs is None:
            runs = self._versions[number] = version_of(self._churn, number, self._seed)
        if event.kind == "restart" and event.version == runs:
            return False
        return not event.versions or runs in event.versions
