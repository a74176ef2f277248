"""The link model: instants, and draws that depend on nothing but their names."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.network.instants import after, instant, nearest_instant
from sim.network.links import LinkModel, Links
from sim.seeds import seeded_peer

A, B, C = (seeded_peer(1, index) for index in range(3))
TICKS = st.integers(0, 10**13)
SECONDS = st.floats(0, 1e7)


@given(TICKS)
def test_a_whole_microsecond_is_its_own_instant(ticks: int) -> None:
    time = ticks / 1_000_000
    assert instant(time) == time == nearest_instant(time)


@given(SECONDS)
def test_an_instant_is_never_before_the_time_and_less_than_a_microsecond_after(seconds: float) -> None:
    assert seconds <= instant(seconds) < seconds + 1.01e-6


def test_never_stays_never() -> None:
    assert instant(math.inf) == math.inf
    assert instant(-math.inf) == -math.inf


def test_sums_of_durations_coincide_as_on_paper() -> None:
    assert after(after(0.0, 0.1), 0.2) == after(0.0, 0.3) == 0.3


@given(TICKS, st.floats(0, 1e3))
def test_a_message_always_arrives_at_a_later_instant(ticks: int, seconds: float) -> None:
    now = ticks / 1_000_000
    due = after(now, seconds)
    assert due > now
    assert instant(due) == due


def test_a_link_gives_the_same_fates_whatever_other_links_carry() -> None:
    model = LinkModel(0.02, 0.2, jitter_seconds=0.05, loss=0.3)
    quiet, busy = Links(model, 7), Links(model, 7)
    alone = [quiet.link(A, B, "").post(0.0) for _ in range(50)]
    among = []
    for _ in range(50):
        busy.link(B, A, "").post(0.0)
        among.append(busy.link(A, B, "").post(0.0))
        busy.link(A, C, "").post(0.0)
        busy.link(A, B, "other").post(0.0)
    assert alone == among


def test_another_seed_gives_other_fates() -> None:
    model = LinkModel(0.02, 0.2, jitter_seconds=0.05)
    assert Links(model, 7).link(A, B, "").post(0.0) != Links(model, 8).link(A, B, "").post(0.0)


@pytest.mark.parametrize("loss", [0.0, 0.02, 0.1, 0.5, 1.0])
def test_as_many_messages_are_lost_as_asked(loss: float) -> None:
    links = Links(LinkModel(loss=loss), 3)
    count = 4_000
    lost = sum(links.link(A, B, "").post(0.0)[1] == math.inf for _ in range(count))
    # Four standard deviations of a binomial.
    assert abs(lost - loss * count) <= 4 * math.sqrt(count * loss * (1 - loss))


def test_latencies_lie_between_nearest_and_farthest_and_are_the_same_both_ways() -> None:
    links = Links(LinkModel(0.02, 0.2), 5)
    peers = [seeded_peer(5, index) for index in range(30)]
    drawn = [links.latency_seconds(one, other) for one in peers for other in peers if one < other]
    assert min(drawn) >= 0.02
    assert max(drawn) <= 0.2
    assert max(drawn) - min(drawn) > 0.15
    assert links.latency_seconds(A, B) == links.latency_seconds(B, A)


def test_jitter_adds_to_the_latency_and_is_bounded() -> None:
    links = Links(LinkModel(0.05, 0.05, jitter_seconds=0.01), 5)
    dues = [links.link(A, B, "").post(1.0)[1] for _ in range(200)]
    assert min(dues) >= 1.05
    assert max(dues) <= 1.060001
    assert len(set(dues)) > 100


@pytest.mark.parametrize(
    "model",
    [
        {"nearest_seconds": -1},
        {"nearest_seconds": 0.2, "farthest_seconds": 0.1},
        {"farthest_seconds": math.inf},
        {"jitter_seconds": -0.1},
        {"loss": 1.5},
        {"bytes_per_second": 0},
    ],
)
def test_a_model_that_means_nothing_is_refused(model: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"want|share"):
        LinkModel(**model)
