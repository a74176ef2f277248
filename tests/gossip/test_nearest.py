"""Tests of the choice among several different states, some of which are invented."""

import numpy as np
import pytest

from crypto.identity import PeerId
from gossip.nearest import Numbers, nearest_first

PEERS = [PeerId(bytes([number]) * 32) for number in range(9)]
SPREAD = 0.1
"""The largest distance of each value of an honest member from the true value."""


def states(*changes: dict[str, Numbers | float] | None, seed: int = 1) -> dict[PeerId, dict[str, Numbers]]:
    """Return one state for each element: an honest state for None, otherwise a state with the given
    arrays."""
    rng = np.random.default_rng(seed)
    common = {"tensor": rng.normal(size=500), "memory/exp_avg": 0.01 * rng.normal(size=500)}
    found: dict[PeerId, dict[str, Numbers]] = {}
    for peer, change in zip(PEERS, changes, strict=False):
        own = {
            name: (numbers + SPREAD * np.std(numbers) * rng.uniform(-1, 1, 500)).astype(np.float32)
            for name, numbers in common.items()
        }
        for name, value in (change or {}).items():
            own[name] = np.full(500, value, np.float32) if isinstance(value, float) else value
        found[peer] = own
    return found


@pytest.mark.parametrize("value", [0.0, 30.0, 1e30, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["tensor", "memory/exp_avg"])
def test_invented_states_of_a_minority_come_last(name: str, value: float) -> None:
    lie: dict[str, Numbers | float] = {name: value}
    for seed in range(10):
        assert set(nearest_first(states(lie, None, None, seed=seed))[:2]) == set(PEERS[1:3])
        # Two states with the same bytes are near each other, but are no majority.
        assert set(nearest_first(states(lie, lie, None, None, None, seed=seed))[:3]) == set(PEERS[2:5])


def test_copied_arrays_do_not_hide_an_invented_one() -> None:
    """In one array each honest member is far from the others, and the liar's array is a copy of another
    member's."""
    for seed in range(10):
        found = states(None, None, None, seed=seed)
        first, second, liar = (found[peer] for peer in PEERS[:3])
        for member, length in ((first, 1.0), (second, 1.1), (liar, 30.0)):
            member["outer/momentum"] = np.full(500, length, np.float32)
        liar |= {"tensor": first["tensor"], "memory/exp_avg": second["memory/exp_avg"]}
        assert nearest_first(found)[-1] == PEERS[2]


def test_a_state_that_differs_in_mostly_zero_values_comes_last() -> None:
    found = states({"outer/momentum": 0.0}, {"outer/momentum": 1e-6}, {"outer/momentum": 0.0})
    assert nearest_first(found)[-1] == PEERS[1]


def test_one_or_two_states_keep_their_order() -> None:
    assert nearest_first(states(None)) == PEERS[:1]
    assert nearest_first(states(None, {"tensor": 30.0})) == PEERS[:2]
