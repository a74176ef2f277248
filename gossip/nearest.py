"""The choice of the state that is nearest to the others, if no two are equal: pure.

Members that train apart and average periodically have states that differ a little. An invented state differs
from all of them by more. In each array a state is scored by its distance to the nearest others that form a
majority with it (after Krum: Blanchard et al. 2017). The state with the lowest worst score is taken.

If fewer than half of the members lie, every majority has an honest member, and the honest ones are a
majority. So with one array, the chosen state is as near to an honest one as the honest are to one another.
With several arrays that is not exact: scores are in units of their median, which a liar lowers by copying
arrays of different honest members; UNIT_SHARE bounds that gain. A liar within these distances may be chosen.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crypto.identity import PeerId

STATES_MIN = 3
"""With fewer states there is no comparison: of two that differ, either may be invented."""
UNIT_SHARE = 0.1
"""Lower bound of the unit of an array's scores, as a share of the median length: honest members that drifted
by a tenth then score no worse than one that a liar has copied."""

Numbers = NDArray[np.float32]


def nearest_first(states: Mapping[PeerId, Mapping[str, Numbers]]) -> list[PeerId]:
    """Return the holders of the states, the nearest to the others first. `states` has the arrays of each
    holder by name, with equal names and lengths. Numbers that are not finite count as infinitely far away."""
    owners = list(states)
    majority = len(owners) // 2
    if not majority:
        return owners
    worst = np.zeros(len(owners))
    for name in next(iter(states.values())):
        vectors = [states[owner][name] for owner in owners]
        scores = np.sort(_distances(vectors), axis=1)[:, majority]  # the first is the distance to itself
        unit = max(_lower_median(scores), UNIT_SHARE * _lower_median(_lengths(vectors)))
        with np.errstate(divide="ignore", invalid="ignore"):
            units = scores / unit
        units[np.isnan(units)] = 0.0 if unit == 0 else np.inf
        worst = np.maximum(worst, units)
    return [owners[place] for place in np.argsort(worst, kind="stable")]


def _lower_median(values: NDArray[Any]) -> float:
    return float(np.sort(values)[(len(values) - 1) // 2])


def _lengths(vectors: list[Numbers]) -> NDArray[Any]:
    with np.errstate(over="ignore", invalid="ignore"):
        found = np.array([np.linalg.norm(vector) for vector in vectors])
    return np.where(np.isnan(found), np.inf, found)


def _distances(vectors: list[Numbers]) -> NDArray[Any]:
    count = len(vectors)
    found = np.zeros((count, count))
    for i in range(count):
        for j in range(i):
            with np.errstate(over="ignore", invalid="ignore"):
                distance = float(np.linalg.norm(vectors[i] - vectors[j]))
            found[i, j] = found[j, i] = np.inf if np.isnan(distance) else distance
    return found
