"""When a member accepts a proposed result, judged by its own held-out losses."""

from math import inf, nan

import pytest

from node.local.verdict import HeldOutLosses, fault_of, is_usable


@pytest.mark.parametrize(
    ("own", "result", "best", "is_at_end", "is_held"),
    [
        (0.5, 0.5, 0.5, True, True),
        (0.5, 0.6, 0.5, True, True),
        (0.5, 2.2, 0.5, True, False),  # the result is junk
        (0.5, inf, 0.5, True, False),
        (0.5, nan, 0.5, True, False),
        (0.5, 0.5, 0.48, False, True),
        (0.5, 0.5, 0.52, False, True),
        (0.5, 0.5, 1.5, False, False),  # reported as no improvement, though it is one
        (0.5, 0.5, 1.5, True, True),
        (0.5, 0.5, inf, False, True),  # this member heard of no evaluation
        (2.31, 2.33, 2.3, True, True),  # no member learned anything
        (inf, 0.5, 0.5, True, True),  # the member's own model is junk
    ],
)
def test_a_result_about_as_good_as_the_members_model_is_accepted(
    own: float, result: float, best: float, is_at_end: bool, is_held: bool
) -> None:
    fault = fault_of(HeldOutLosses(2.3, own, result), best, 0.0, is_at_end=is_at_end)
    assert (not fault) == is_held, fault


def test_a_state_far_worse_than_the_initial_values_is_rejected() -> None:
    assert is_usable(2.3, 0.4)
    assert is_usable(2.3, 2.9)
    assert not is_usable(2.3, 4.0)
    assert not is_usable(2.3, inf)
