"""Churn schedules are in order, identical for the same seed, and in the steady state from the beginning."""

from itertools import groupby, islice, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.errors import UsageError
from sim.churn.model import Churn, Distribution
from sim.churn.schedule import STAY_SECONDS_MIN, PopulationChange, changes
from sim.churn.traces import read_trace

HOUR, DAY = 3600.0, 86_400.0
EXPONENTIAL = Churn(
    sessions=Distribution("exponential", HOUR), absences=Distribution("exponential", HOUR), permanent=0
)

distributions = st.builds(
    Distribution,
    st.sampled_from(["weibull", "lognormal", "exponential", "constant", "bathtub", "forever"]),
    st.floats(1, 1e4),
    st.floats(0.4, 3),
)
churns = st.builds(
    Churn,
    profile=st.sampled_from(["none", "kad", "bittorrent", "spot"]),
    sessions=distributions,
    absences=distributions,
    permanent=st.integers(0, 3),
    speedup=st.sampled_from([1.0, 7.0, 60.0]),
    wave_depth=st.sampled_from([0.0, 0.5, 1.0]),
    wave_seconds=st.just(5_000.0),
)


def up_at(found: list[PopulationChange], numbers: range, moment: float) -> set[int]:
    """Return the peers that are up at a moment."""
    up = set(numbers)
    for change in found:
        if change.time <= moment:
            (up.add if change.up else up.discard)(change.number)
    return up


@settings(max_examples=60, deadline=None)
@given(churns, st.integers(0, 12), st.integers(0, 2**32))
def test_arrivals_and_departures_alternate_and_spare_permanent_peers(
    churn: Churn, nodes: int, seed: int
) -> None:
    found = list(islice(changes(churn, nodes, 2_000.0, seed), 2_000))
    assert [(change.time, change.number) for change in found] == sorted(
        (change.time, change.number) for change in found
    )
    assert all(churn.permanent <= change.number < nodes and change.time < 2_000 for change in found)
    for _, own in groupby(sorted(found, key=lambda change: change.number), key=lambda change: change.number):
        lives = list(own)
        assert not lives[0].up
        for one, following in pairwise(lives):
            assert one.up != following.up
            assert following.time - one.time >= STAY_SECONDS_MIN - 1e-9
        assert [change.why for change in lives if change.why == "absent"] == ["absent"] * (lives[0].time == 0)


def test_sessions_are_independent_of_other_peers_and_of_the_horizon() -> None:
    few = list(changes(EXPONENTIAL, 5, HOUR, 7))
    many = [change for change in changes(EXPONENTIAL, 500, 10 * HOUR, 7) if change.number < 5]
    assert few == [change for change in many if change.time < HOUR]
    assert few != list(changes(EXPONENTIAL, 5, HOUR, 8))


@pytest.mark.parametrize("shape", [0.6, 1.0])
def test_the_swarm_is_in_its_steady_state_from_the_beginning(shape: float) -> None:
    churn = Churn(
        sessions=Distribution("weibull", 2 * HOUR, shape),
        absences=Distribution("weibull", HOUR, shape),
        permanent=0,
    )
    nodes = range(2_000)
    found = list(changes(churn, len(nodes), 8 * HOUR, 3))
    for hour in range(8):
        assert len(up_at(found, nodes, hour * HOUR)) / len(nodes) == pytest.approx(2 / 3, abs=0.04)


def test_endless_sessions_never_end_and_departed_peers_stay_away() -> None:
    assert list(changes(Churn(), 100, DAY, 1)) == []
    mortal = Churn(sessions=Distribution("exponential", HOUR), absences=Distribution("forever"))
    found = list(changes(mortal, 101, 100 * HOUR, 1))
    assert len(found) == 100
    assert not any(change.up for change in found)


def test_speedup_divides_all_times() -> None:
    slow = list(changes(EXPONENTIAL, 50, 10 * HOUR, 4))
    fast = Churn(sessions=EXPONENTIAL.sessions, absences=EXPONENTIAL.absences, permanent=0, speedup=10.0)
    quick = list(changes(fast, 50, HOUR, 4))
    assert [change._replace(time=0.0) for change in slow] == [change._replace(time=0.0) for change in quick]
    assert [change.time / 10 for change in slow] == pytest.approx([change.time for change in quick])


def test_some_peers_crash_and_the_others_say_goodbye() -> None:
    downs = [change for change in changes(EXPONENTIAL, 1_000, HOUR, 2) if not change.up and change.time > 0]
    assert sum(change.why == "crash" for change in downs) / len(downs) == pytest.approx(0.7, abs=0.05)
    assert {change.why for change in downs} == {"crash", "leave"}


def test_a_daily_wave_removes_peers_at_night_and_keeps_the_mean() -> None:
    wave = Churn(
        sessions=EXPONENTIAL.sessions,
        absences=EXPONENTIAL.absences,
        permanent=0,
        wave_depth=0.8,
        wave_seconds=DAY,
    )
    nodes = range(1_000)
    found = list(changes(wave, len(nodes), 3 * DAY, 5))
    share = [len(up_at(found, nodes, DAY + hour * HOUR)) / len(nodes) for hour in range(0, 24, 2)]
    noon, midnight = share[0], share[6]
    assert noon > 0.75
    assert midnight < 0.25
    assert sum(share) / len(share) == pytest.approx(0.5, abs=0.05)


def test_lab_machines_are_up_by_day_and_down_at_weekends() -> None:
    nodes = range(300)
    found = list(changes(Churn(profile="lab", permanent=0), len(nodes), 8 * DAY, 6))
    # The schedule starts on a Monday at noon.
    share = {
        hours: len(up_at(found, nodes, hours * HOUR)) / len(nodes)
        for hours in (0, 12, 24, 5 * 24, 6 * 24, 7 * 24)
    }
    assert share[12] == share[5 * 24] == share[6 * 24] == 0
    for hours in (0, 24, 7 * 24):
        assert share[hours] == pytest.approx(0.9, abs=0.06)


def test_ten_thousand_peers_are_cheap_because_draws_are_lazy() -> None:
    stream = changes(Churn(profile="kad", permanent=0), 10_000, 1e9, 1)
    first = list(islice(stream, 20_000))
    # Sessions are drawn lazily, so the million years are not drawn.
    assert first[-1].time < 12 * HOUR


TRACE = """peer,time,state
# Two machines of a lab.
lab-1,10,up
lab-2,0.5,down

lab-1,70.25,down
lab-2,20,up
"""


def test_a_trace_numbers_peers_by_appearance_including_initial_peers(tmp_path: Path) -> None:
    path = tmp_path / "lab.csv"
    path.write_text(TRACE)
    found = list(changes(Churn(trace=str(path), crash_share=1.0), 5, 60.0, 1))
    assert [(change.time, change.number, change.up, change.why) for change in found] == [
        (0.0, 1, False, "absent"),
        (0.5, 2, False, "crash"),
        (10.0, 1, True, "return"),
        (20.0, 2, True, "return"),
    ]
    with pytest.raises(UsageError, match="2 peers, but only 1 of 2 may come and go"):
        changes(Churn(trace=str(path)), 2, 60.0, 1)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("lab-1,80,upp", "lab.csv:8: 'upp' is neither up nor down"),
        ("lab-1,60,up", "lab.csv:8: lab-1 at 60 s comes after its line for 70.25 s"),
        ("lab-1,80,down", "lab.csv:8: lab-1 is down already since 70.25 s"),
        ("lab-1,-3,up", "lab.csv:8: time '-3': expected seconds since the start, 0 or more"),
        ("lab-1,nan,up", "lab.csv:8: time 'nan': expected seconds since the start, 0 or more"),
        ("lab-1,90", "lab.csv:8: expected three columns: peer, time in seconds, up or down"),
        ('"lab-1,90,up', "lab.csv:8: not CSV: unexpected end of data"),
    ],
)
def test_the_error_names_a_wrong_line_of_a_trace(line: str, complaint: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_trace((TRACE + line).splitlines(keepends=True), name="lab.csv")
    assert str(caught.value) == complaint
