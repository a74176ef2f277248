"""Replicas under CPU quotas: their unthrottled times, measured while they do not wait for others."""

from hypothesis import given
from hypothesis import strategies as st

from partition.plan.cost import LayerCost
from partition.plan.problem import Constraints, Link, PeerCost, Problem, Split
from partition.plan.rebalance import measured, move_borders
from partition.run.quota_watch import QuotaWatch

MIB = 1 << 20
LAYERS = tuple(LayerCost(MIB, 10**8, MIB, 10_000) for _ in range(26))
QUOTAS = (150, 300, 600)
"""Quotas, in thousandths of a processor."""
SHARES = {f"peer-{number}": quota for number, quota in enumerate(QUOTAS)}
LAYER_NANOSECONDS = 1_800_000
"""Times on a whole processor."""
SPLIT = Split(((0, 7), (7, 10), (10, 26)), ((1,), (0,), (2,)), 0, 0)


def three(quotas: tuple[int, ...] = QUOTAS) -> Problem:
    peers = tuple(
        PeerCost(f"peer-{number}", 8 << 30, *(((LAYER_NANOSECONDS // 2 * 1000 // quota,) * 26,) * 2))
        for number, quota in enumerate(quotas)
    )
    links = {"default_link": Link(10**9, 10_000), "constraints": Constraints(replicas=1)}
    return Problem(LAYERS, peers, microbatches=16, **links)  # type: ignore[arg-type]  # of any field


def taken(split: Split, *slowest: int, quotas: tuple[int, ...]) -> dict[str, int]:
    """Return the observed times: the `slowest` replicas run at their quota, the others at full speed."""
    found = {}
    for (first, last), (place,) in zip(split.ranges, split.groups, strict=True):
        permille = quotas[place] if place in slowest else 1000
        found[f"peer-{place}"] = (last - first) * LAYER_NANOSECONDS * 1000 // permille
    return found


def moved(watch: QuotaWatch, split: Split, paces: dict[str, int], problem: Problem) -> Split:
    named = watch.without_pauses(problem, split, paces, SHARES)
    return move_borders(measured(problem, split, named), split, steps_left=1000).split


def step(split: Split, quotas: tuple[int, ...]) -> float:
    """Return the slowest stage's time for a micro-batch."""
    every = taken(split, *range(3), quotas=quotas)
    return max(every.values()) / 1e6


def test_the_next_plan_is_nearly_optimal_under_quotas() -> None:
    throttled = (150, 300, 200)
    paces = taken(SPLIT, 2, quotas=throttled)  # the two others wait for it, and compute at full speed
    new = moved(QuotaWatch(), SPLIT, paces, three())
    best = move_borders(three(throttled), SPLIT, steps_left=1000).split
    assert step(best, throttled) >= 0.9 * step(new, throttled)
    assert step(new, throttled) < 0.6 * step(SPLIT, throttled)
    # By the raw times, the others seem so fast that the throttled replica is left with almost nothing.
    naive = move_borders(measured(three(), SPLIT, paces), SPLIT, steps_left=1000).split
    assert step(best, throttled) < 0.8 * step(naive, throttled)


def test_a_replica_measured_slow_does_not_get_all_layers_back() -> None:
    throttled, watch = (150, 300, 200), QuotaWatch()
    new = moved(watch, SPLIT, taken(SPLIT, 2, quotas=throttled), three())
    again = moved(watch, new, taken(new, 0, quotas=throttled), three())
    assert step(again, throttled) < 1.2 * step(new, throttled)


def test_a_recovered_replica_gets_its_layers_back_after_some_checks() -> None:
    watch = QuotaWatch()
    split = moved(watch, SPLIT, taken(SPLIT, 2, quotas=(150, 300, 200)), three())
    for _ in range(8):
        split = moved(watch, split, taken(split, 0, 1, quotas=QUOTAS), three())
    assert step(split, QUOTAS) <= 1.1 * step(SPLIT, QUOTAS)


def test_times_on_a_whole_processor_count_as_measured() -> None:
    paces = {"peer-0": 1, "peer-1": 2, "peer-2": 10**9}
    watch = QuotaWatch()
    assert watch.without_pauses(three(), SPLIT, paces, {}) == paces
    assert watch.without_pauses(three(), SPLIT, paces, dict.fromkeys(SHARES, 1000)) == paces


def test_unknown_times_stay_unknown() -> None:
    assert QuotaWatch().without_pauses(three(), SPLIT, {"peer-0": 0}, SHARES) == {"peer-0": 0}


@given(st.lists(st.integers(1, 10**12), min_size=3, max_size=3))
def test_no_replica_counts_as_faster_than_measured_or_calibrated(values: list[int]) -> None:
    problem, paces = three(), {f"peer-{number}": value for number, value in enumerate(values)}
    found = QuotaWatch().without_pauses(problem, SPLIT, paces, SHARES)
    for (first, last), (place,) in zip(SPLIT.ranges, SPLIT.groups, strict=True):
        peer = problem.peers[place]
        calibrated = sum(peer.forward[first:last]) + sum(peer.backward[first:last])
        assert found[peer.name] >= max(paces[peer.name], calibrated)
