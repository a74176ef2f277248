"""Many runs submitted concurrently: which run was served where and when, according to the providers' own
reports."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Told:
    """A provider's report: at this time it gave a slot to the run, or the run ended there."""

    provider: str
    run: str
    at: float
    is_end: bool


@dataclass(frozen=True)
class Served:
    """The time during which a run had a slot of a provider."""

    run: str
    provider: str
    begun: float
    ended: float

    def seconds(self, until: float) -> float:
        """Return the length of the part of this time before `until`."""
        return max(0.0, min(self.ended, until) - self.begun)


def served(told: Iterable[Told]) -> list[Served]:
    """Return each time that a run had a slot. If a run got a second slot of the same provider before its end,
    the first entry continues."""
    begun: dict[tuple[str, str], float] = {}
    found = []
    for each in sorted(told, key=lambda each: each.at):
        key = each.run, each.provider
        if not each.is_end:
            begun.setdefault(key, each.at)
        elif key in begun:
            found.append(Served(each.run, each.provider, begun.pop(key), each.at))
    assert not begun, f"these runs never ended where they were served: {sorted(begun)}"
    return found


def most_at_once(rows: Sequence[Served]) -> Mapping[str, int]:
    """Return the largest number of slots that each provider gave simultaneously, not counting the instant
    when one ends as the next begins."""
    changes = defaultdict[str, list[tuple[float, int]]](list)
    for row in rows:
        changes[row.provider] += [(row.begun, 1), (row.ended, -1)]
    most = dict[str, int]()
    for provider, ordered in changes.items():
        now = 0
        for _, change in sorted(ordered):
            now += change
            most[provider] = max(most.get(provider, 0), now)
    return most


def shares(rows: Sequence[Served], requesters: Mapping[str, str]) -> Mapping[str, float]:
    """Return what each requester got as a multiple of its equal share, during the time in which all had
    waiting runs. `requesters` names the requester of each run."""
    last = dict[str, float]()
    for row in rows:
        whose = requesters[row.run]
        last[whose] = max(last.get(whose, row.begun), row.begun)
    until = min(last.values())
    got = defaultdict[str, float](float)
    for row in rows:
        got[requesters[row.run]] += row.seconds(until)
    fair = sum(got.values()) / len(last)
    return {whose: got[whose] / fair for whose in sorted(last)}
