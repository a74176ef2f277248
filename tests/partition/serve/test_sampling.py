"""Choosing tokens: filters are applied in transformers' order, and draws depend only on seed and position."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from partition.serve.messages import BEST_MAX, Answer, UnitWork
from partition.serve.sampling import LogitRow, Sampling, choose, draw, log_sum, read_row
from partition.serve.selection import best_logits, find_drawn


def row(*numbers: float) -> Any:
    return np.array(numbers, np.float32)


def best(logits: Any, count: int) -> LogitRow:
    ids, values = best_logits(logits, count)
    return LogitRow(values, ids=ids)


def chosen_by_full_sort(
    logits: Any, sampling: Sampling, position: int, made: list[int], prompt: list[int], allowed: Any
) -> int:
    """Return the result of a full sort of the row, step by step."""
    scores = logits.astype(np.float64)
    if sampling.repetition_penalty != 1:
        for token in {*prompt, *made}:
            penalty = sampling.repetition_penalty
            scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token, bias in sampling.biases:
        scores[token] += bias
    for token in set(made):
        scores[token] -= sampling.presence_penalty + sampling.frequency_penalty * made.count(token)
    order = np.argsort(-scores, kind="stable")
    if allowed is not None:
        order = order[allowed[order]]
    if sampling.temperature == 0:
        return int(order[0])
    order = order[: sampling.top_k or None]
    shares = np.exp((scores[order] - scores[order[0]]) / sampling.temperature)
    shares /= shares.sum()
    if sampling.top_p < 1:
        shares = shares[: int(np.searchsorted(np.cumsum(shares), sampling.top_p)) + 1]
    if sampling.min_p > 0:
        shares = shares[shares >= sampling.min_p * shares[0]]
    ends = np.cumsum(shares)
    place = int(np.searchsorted(ends, draw(sampling.seed, position) * ends[-1], side="right"))
    return int(order[min(place, len(ends) - 1)])


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 50.0]),
    top_k=st.sampled_from([0, 0, 0, 3, 300, 5_000]),
    top_p=st.sampled_from([1.0, 0.1, 0.5, 0.75, 0.9, 0.999999]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(0, 2**63 - 1),
    frequency_penalty=st.sampled_from([0.0, 0.3]),
    presence_penalty=st.sampled_from([0.0, -1.5]),
    biases=st.sampled_from([(), ((0, 2.5), (1, -100.0))]),
    repetition_penalty=st.sampled_from([1.0, 1.2]),
)


@settings(max_examples=150)
@given(
    SAMPLINGS,
    st.sampled_from(["normal", "steep", "few values", "equal"]),
    st.integers(2, 3_000),
    st.booleans(),
)
def test_sampling_from_a_whole_row_equals_a_full_sort(
    sampling: Sampling, kind: str, size: int, is_masked: bool
) -> None:
    rng = np.random.default_rng(sampling.seed % 2**32)
    logits = {
        "normal": rng.normal(size=size),
        "steep": rng.normal(size=size) * 40,
        "few values": rng.integers(-2, 3, size).astype(float),
        "equal": np.ones(size),
    }[kind].astype(np.float32)
    made, prompt = rng.integers(0, size, 5).tolist(), rng.integers(0, size, 9).tolist()
    allowed = (rng.random(size) < 0.5) | (np.arange(size) == 1) if is_masked else None
    for position in range(4):
        wanted = chosen_by_full_sort(logits, sampling, position, made, prompt, allowed)
        found = choose(LogitRow(logits), sampling, position, made, prompt=prompt, allowed=allowed)
        assert found == wanted


def test_a_long_row_is_sampled_without_sorting_it() -> None:
    logits = np.random.default_rng(1).normal(size=150_000).astype(np.float32)
    for position in range(10):
        number = draw(5, position)
        for sampling in (
            Sampling(1.0, seed=5),
            Sampling(0.8, top_p=0.9, seed=5),
            Sampling(1.0, min_p=0.1, seed=5),
        ):
            found = find_drawn(logits, sampling.temperature, sampling.top_p, sampling.min_p, number)
            assert found == chosen_by_full_sort(logits, sampling, position, [], [], None)


def test_infinite_logits_can_be_sampled() -> None:
    wide = np.array([-1e308, 0.0, 1e308, 1.7e308])
    assert find_drawn(wide, 0.001, 1.0, 0.0, 0.5) == 3
    assert choose(LogitRow(wide), Sampling(0.001, seed=1), 0) == 3
    assert find_drawn(wide, 1.0, 0.9, 0.0, 0.5) == 3
    assert find_drawn(np.array([1e-320, 0.0]), 1.0, 1.0, 0.0, 0.2) in (0, 1)


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-300])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}])
def test_the_smallest_temperatures_choose_the_most_likely_token(
    temperature: float, filters: dict[str, Any]
) -> None:
    logits = row(1.0, -3.0, 4.0, 2.0, -5.0)
    for seed in range(5):
        sampling = Sampling(temperature, seed=seed, **filters)
        assert choose(LogitRow(logits), sampling, 0) == 2
        assert choose(best(logits, 5), sampling, 0) == 2


def test_an_encoded_row_decodes_unchanged() -> None:
    logits = row(0.5, 2.0, -1.0)
    work = UnitWork(bytes(16), 0, 0, 1, 1, 0)
    found = read_row(work, Answer(bytes(16), 0, 0, (2.25,)), [("float32", logits)], 3)
    assert found is not None
    assert found.likeliest(2) == ((1, -0.25), (0, -1.75))
    assert found.logprob(2) == -3.25


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=40), st.integers(1, 45))
def test_the_best_logits_equal_those_of_a_full_sort(numbers: list[int], count: int) -> None:
    logits = np.array(numbers, np.float32)
    order = np.argsort(-logits, kind="stable")[:count]
    ids, values = best_logits(logits, count)
    assert ids.tolist() == order.tolist()
    assert values.tolist() == logits[order].tolist()


def test_greedy_sampling_takes_the_lowest_id_of_equal_logits() -> None:
    assert choose(best(row(1, 7, 7), 1), Sampling(), 5) == 1


@given(
    st.integers(1, 20),
    st.sampled_from([0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.1]),
    st.integers(0, 2**63 - 1),
)
def test_the_best_logits_alone_are_enough_for_top_k(
    top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    logits = np.random.default_rng(seed % 1000).normal(size=60).astype(np.float32)
    sampling = Sampling(0.7, top_k, top_p, min_p, seed)
    whole, some = best(logits, 60), best(logits, sampling.best)
    for position in range(5):
        assert choose(whole, sampling, position) == choose(some, sampling, position)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.8),
        Sampling(1.3, top_k=7),
        Sampling(1.0, top_p=0.7),
        Sampling(0.9, min_p=0.15),
        Sampling(1.1, top_k=20, top_p=0.8, min_p=0.05),
    ],
)
def test_token_frequencies_equal_those_of_transformers(sampling: Sampling) -> None:
    torch = pytest.importorskip("torch")
    process = pytest.importorskip("transformers.generation.logits_process")
    logits = np.random.default_rng(7).normal(size=40) * 2
    wanted = torch.tensor(logits)[None]
    steps = [process.TemperatureLogitsWarper(sampling.temperature)]
    steps += [process.TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    steps += [process.TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    steps += [process.MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    for step in steps:
        wanted = step(None, wanted)
    shares = torch.softmax(wanted, -1)[0].numpy()
    drawn = np.bincount([choose(best(logits, 40), sampling, at) for at in range(4_000)], minlength=40)
    assert set(np.flatnonzero(drawn)) <= set(np.flatnonzero(shares))
    assert np.abs(drawn / 4_000 - shares).max() < 0.03


def test_a_sampled_token_depends_only_on_seed_and_position() -> None:
    assert draw(1, 2) == draw(1, 2)
    assert len({draw(1, 2), draw(2, 1), draw(1, 3)}) == 3
    assert 0.48 < np.mean([draw(3, at) for at in range(4_000)]) < 0.52


def test_only_the_logits_that_decide_are_requested() -> None:
    assert Sampling().best == 1
    assert Sampling(1.0, top_k=40).best == 40
    assert Sampling(1.0, top_k=BEST_MAX + 1).best == 0
    assert Sampling(1.0, top_p=0.9).best == 0


def test_the_log_sum_covers_the_whole_row() -> None:
    logits = row(1, 2, 3)
    assert log_sum(logits) == pytest.approx(float(np.log(np.exp([1.0, 2.0, 3.0]).sum())))


def test_penalties_count_only_tokens_of_the_answer() -> None:
    whole = LogitRow(row(1.0, 1.4, 0.0))
    once = Sampling(presence_penalty=0.5)
    often = Sampling(frequency_penalty=0.25)
    assert not once.is_plain
    assert once.best == 0
    assert choose(whole, once, 3, [1]) == choose(whole, once, 3, [1, 1, 1]) == 0
    assert [choose(whole, often, 3, [1] * count) for count in (0, 1, 2)] == [1, 1, 0]


def test_a_bias_can_ban_a_token_or_all_others() -> None:
    whole = LogitRow(row(1.0, 9.0, 0.0))
    assert choose(whole, Sampling(biases=((1, -100.0),)), 0) == 0
    always = Sampling(1.0, biases=((2, 100.0), (70, 5.0)))
    assert {choose(whole, always, position) for position in range(50)} == {2}


def test_reporting_alternatives_changes_no_choice() -> None:
    logits = np.random.default_rng(3).normal(size=60).astype(np.float32)
    for plain in (Sampling(0.0, seed=4), Sampling(0.9, 5, seed=4)):
        told = Sampling(plain.temperature, plain.top_k, seed=4, top=20)
        assert told.best == 20
        for position in range(20):
            rows = best(logits, told.best)
            assert choose(rows, told, position) == choose(best(logits, plain.best), plain, position)


def test_a_repetition_penalty_equals_that_of_transformers() -> None:
    import torch
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = np.random.default_rng(2).normal(size=40)
    prompt, made = [3, 3, 9], [12, 30]
    for penalty in (0.5, 1.3, 4.0):
        scores = RepetitionPenaltyLogitsProcessor(penalty)(
            torch.tensor([[*prompt, *made]]), torch.tensor(logits)[None]
        )
        sampling = Sampling(repetition_penalty=penalty)
        assert not sampling.best
        assert choose(LogitRow(logits), sampling, 5, made, prompt=prompt) == int(scores.argmax())


def test_only_allowed_tokens_are_drawn() -> None:
    logits = np.random.default_rng(3).normal(size=30)
    order = np.argsort(-logits, kind="stable")
    allowed = np.isin(np.arange(30), [int(order[-1]), int(order[-2])])
    drawn = {
        choose(LogitRow(logits), Sampling(1.0, seed=seed, top_k=5), 9, allowed=allowed) for seed in range(40)
    }
    assert drawn == set(np.flatnonzero(allowed).tolist())
    assert choose(LogitRow(logits), Sampling(), 9, allowed=allowed) == order[-2]
