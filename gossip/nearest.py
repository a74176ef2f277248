"""The choice of the state that is nearest to the others, if no two states are equal: pure.

Members that train apart and average periodically have states that differ slightly. An invented state differs
from all of them by more. In each array, a state's score is its distance to the nearest others that form a
majority together with it (after Krum: Blanchard et al. 2017). The state with the lowest worst score is
chosen.

If fewer than half of the members lie, every majority includes an honest member, and the honest members are a
majority. So with one array, the chosen state is as near to an honest one as the honest states are to one
another. With several arrays this is not exact: scores are in units of their median, which a liar can lower by
copying arrays of different honest members; UNIT_SHARE bounds what this gains. A liar within these distances
may be chosen.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crypto.identity import PeerId

STATES_MIN = 3
"""Minimum number of states. With two different states there is no comparison, because either may be
invented."""
UNIT_SHARE = 0.1
"""Lower bound for the unit of an array's scores, as a share of the median length. With it, honest members
that drifted apart by a tenth do not score worse than a member whose array a liar has copied."""

Numbers = NDArray[np.float32]


def nearest_first(states: Mapping[PeerId, Mapping[str, Numbers]]) -> list[PeerId]:
    """Return the holders of the states, the nearest to the others first. `states` has the arrays of each
    holder by name, with equal names and lengths. Values that are not finite count as infinitely far away."""
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
