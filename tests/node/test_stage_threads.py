"""The number of threads with which a stage computes, on a machine whose speed a test sets."""

from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.stages.threads import ThreadChooser, adaptive, candidates
from partition import stage as api

PASSES = 8
IDLE: Mapping[int, float] = {4: 0.3, 2: 0.5, 1: 1.0}
BUSY: Mapping[int, float] = {4: 20.0, 2: 3.0, 1: 1.2}


def play(chooser: ThreadChooser, seconds: Callable[[int], Mapping[int, float]], steps: int) -> list[float]:
    """Return each step's time. `seconds` gives the time of a pass for a step number and a number of
    threads."""
    taken = []
    for step in range(steps):
        taken.append(seconds(step)[chooser.threads] * PASSES)
        chooser.stepped(taken[-1], PASSES)
    return taken


def test_candidate_thread_counts_are_halves_down_to_one() -> None:
    assert [candidates(most) for most in (1, 2, 3, 8, 16)] == [
        (1,),
        (2, 1),
        (3, 1),
        (8, 4, 2, 1),
        (16, 8, 4, 1),
    ]


@pytest.mark.parametrize(("machine", "best"), [(IDLE, 4), (BUSY, 1)])
def test_the_fastest_thread_count_is_found_within_a_few_steps(
    machine: Mapping[int, float], best: int
) -> None:
    chooser = ThreadChooser(candidates(4))
    play(chooser, lambda _: machine, 6)
    assert chooser.threads == best


@given(st.lists(st.floats(0.1, 10.0), min_size=3, max_size=3))
def test_trying_thread_counts_loses_at_most_a_sixth_of_the_best_speed(times: list[float]) -> None:
    """The loss is counted over a long run, including all trials."""
    machine = dict(zip((4, 2, 1), times, strict=True))
    taken = play(ThreadChooser(candidates(4)), lambda _: machine, 2_000)
    assert 2_000 * PASSES * min(times) >= 0.85 * (sum(taken) - 3 * PASSES * max(times))


def test_the_thread_count_is_chosen_again_when_the_load_changes() -> None:
    def seconds(step: int) -> Mapping[int, float]:
        return BUSY if 100 <= step < 300 else IDLE

    chooser = ThreadChooser(candidates(4))
    taken = play(chooser, seconds, 1_500)
    assert sum(step == 1.2 * PASSES for step in taken[104:300]) >= 180
    assert chooser.threads == 4


def test_the_thread_count_changes_only_between_steps() -> None:
    now = [0]
    said: list[int] = []
    seen: list[tuple[str, int]] = []
    chooser = ThreadChooser(candidates(2))

    def handle(request: api.Request) -> api.Reply:
        now[0] += 10**9 if isinstance(request, api.Backward) else 0
        seen.append((type(request).__name__, chooser.threads))
        return api.StageDone()

    handled = adaptive(handle, chooser, set_threads=said.append, clock=lambda: now[0])
    for step in range(4):
        for number in range(2):
            handled(api.Backward(step, number, None))  # type: ignore[arg-type]  # nothing is computed here
        handled(api.Apply(step, 1))
    assert said == [1, 2]
    steps = [seen[start : start + 3] for start in range(0, len(seen), 3)]
    assert all(len({threads for _, threads in step}) == 1 for step in steps)
