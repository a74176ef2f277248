"""Training with lossy frames: digits with the built-in CNN in two stages, in one process."""

from functools import cache

import numpy as np
import pytest
import torch

from node.content.datasets import load_digits
from partition.codecs.choice import Frames
from partition.stage import OptimizerSettings
from tests.partition.held import Row, bundle, spread
from tests.stack import simple_cnn

torch.set_num_threads(1)
MICROBATCH, MICROBATCHES, STEPS = 16, 8, 50
ADAM = OptimizerSettings("adam", learning_rate=0.002)


@cache
def trained(frames: Frames | None, steps: int = STEPS) -> tuple[list[float], Row]:
    """Return the mean loss of each step, with the same samples in the same order for all frame codecs."""
    stages = spread(simple_cnn("float32").graph, 2)
    row = Row(stages, (MICROBATCH,), 1, frames, microbatches=MICROBATCHES, optimizer=ADAM)
    digits, draws = load_digits(), np.random.default_rng(0)
    losses = []
    for step in range(steps):
        total = 0.0
        for number in range(step * MICROBATCHES, (step + 1) * MICROBATCHES):
            chosen = draws.integers(0, len(digits.train["y"]), MICROBATCH)
            inputs = bundle(digits.train["x"][chosen].astype(np.float32), sizes=(MICROBATCH,))
            labels = bundle(digits.train["y"][chosen], sizes=(MICROBATCH,))
            total += row.forward(step, number, inputs, labels, train=True).loss
        samples = MICROBATCH * MICROBATCHES
        row.apply(step, samples)
        losses.append(total / samples)
    return losses, row


def test_exact_frames_change_nothing() -> None:
    (losses, row), (compressed, other) = trained(None, 8), trained("exact", 8)
    assert losses == compressed
    for name, array in row.named("parameters").items():
        assert array.tobytes() == other.named("parameters")[name].tobytes()


@pytest.mark.parametrize(("frames", "forward", "backward"), [("int8", 0.01, 0.01), ("int4", 0.01, 0.2)])
def test_training_with_lossy_frames_reaches_about_the_same_loss(
    frames: Frames, forward: float, backward: float
) -> None:
    (losses, _), (found, row) = trained(None), trained(frames)
    # Compare the whole curve, because Adam amplifies small differences: two runs that differ only in the last
    # bit end a few percent apart.
    assert np.mean(found) == pytest.approx(np.mean(losses), rel=0.02)
    assert np.mean(found[-10:]) < 0.3 * losses[0]
    assert 0 < row.rounding_forward.relative < forward
    assert 0 < row.rounding_backward.relative < backward
