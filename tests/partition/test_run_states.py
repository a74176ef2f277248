"""The table of a run's states: every state is reached, and final states have no successors."""

from typing import get_args

import pytest

from crypto.errors import LocalProtocolError
from partition.run.states import NEXT, OVER, Cause, State, after


def test_the_table_names_every_state_and_only_known_causes() -> None:
    assert set(NEXT) == set(get_args(State))
    for leads in NEXT.values():
        assert set(leads) <= set(get_args(Cause))
        assert set(leads.values()) <= set(get_args(State))


def test_every_state_is_reachable_and_leads_to_an_end() -> None:
    reached: set[State] = {"submitted"}
    new = reached
    while new:
        new = {to for state in new for to in NEXT[state].values()} - reached
        reached |= new
    assert reached == set(NEXT)
    assert set(OVER) == {"done", "failed", "stopped"}
    for state in set(NEXT) - set(OVER):
        assert "failed" in NEXT[state].values()


def test_a_final_state_stays_final() -> None:
    for state in OVER:
        with pytest.raises(LocalProtocolError, match="cannot happen"):
            after(state, "plan in force")
