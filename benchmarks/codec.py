"""The cost and savings of encoding frames: ratio, speed and error of every codec on real tensors between
stages.

The tensors are those between the two halves of the built-in GPT (on this repository's texts) and CNN (on
digits, enlarged), at their initial values and after some steps. They are the activations of a `Forward`, and
the gradients in the last stage's answer. The choice of a codec for links of given rates is then shown, using
the measured costs.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from _figures import Goal, arguments, leave, report

from node.content.datasets import load_digits
from partition.capture.models.model_spec import capture_built_in
from partition.codecs.choice import Frames, allowed, calibrate, choose
from partition.codecs.codec import CODECS, Array, Codec, Payload, pack, pack_measured, typed, unpack
from partition.stage import Discard, Forward, Forwarded, OptimizerSettings, StageDone
from tests.partition.held import Row, bundle, spread

MIB = 1 << 20
SIZES_MIB = (1, 4, 16)
SAMPLES_MAX = 1_024
TOKENS, WIDTH = 256, 384
SIDE = 32
TRAINED_STEPS = 12
ADAM = OptimizerSettings("adamw", learning_rate=1e-3)
SPEED_GOAL = 1_000.0
RATIO_GOAL = 3.8
ERROR_MAX = 0.01
FAST, SLOW = 2e9, 12.5e6
LINKS = (FAST, 1.25e9, 125e6, SLOW)
Batches = Callable[[int], tuple[Payload, Payload]]


@dataclass(frozen=True)
class Model:
    """A model in two stages, with a function that makes a micro-batch of a number of samples."""

    name: str
    row: Row
    batches: Batches
    sample_bytes: int
    """The bytes that cross between the stages for one sample."""


def gpt() -> Model:
    """Return a GPT of four layers of width 384 that reads the repository's texts as bytes."""
    captured = capture_built_in("gpt", (TOKENS,), 256, options={"layers": 4, "heads": 6, "width": WIDTH})
    row = Row(spread(captured.graph, 2), (SAMPLES_MAX, TOKENS), optimizer=ADAM)
    root = Path(__file__).parents[1]
    text = b"".join(
        (root / name).read_bytes()
        for name in ("docs/design.md", "docs/failures.md", "ARCHITECTURE.md", "README.md", "CONTRIBUTING.md")
    )
    letters = np.frombuffer(text, np.uint8).astype(np.int64)
    draws = np.random.default_rng(0)

    def batches(count: int) -> tuple[Payload, Payload]:
        begins = draws.integers(0, len(letters) - TOKENS - 1, count)
        windows = np.stack([letters[begin : begin + TOKENS + 1] for begin in begins])
        sizes = (count, TOKENS)
        return bundle(windows[:, :-1], sizes=sizes), bundle(windows[:, 1:], sizes=sizes)

    return Model("gpt", row, batches, 4 * TOKENS * WIDTH)


def cnn() -> Model:
    """Return the built-in CNN for 32x32 pixels, on digits enlarged by four and cut after its second ReLU."""
    captured = capture_built_in("simple-cnn", (1, SIDE, SIDE), 10)
    row = Row(spread(captured.graph, 2), (SAMPLES_MAX,), optimizer=ADAM)
    digits, draws = load_digits(), np.random.default_rng(0)

    def batches(count: int) -> tuple[Payload, Payload]:
        chosen = draws.integers(0, len(digits.train["y"]), count)
        images = np.kron(digits.train["x"][chosen], np.ones((1, 1, 4, 4))).astype(np.float32)
        return bundle(images, sizes=(count,)), bundle(digits.train["y"][chosen], sizes=(count,))

    model = Model("cnn", row, batches, 1)
    activation, _ = crossing(model, 1)
    return Model("cnn", row, batches, activation.nbytes)


def crossing(model: Model, count: int) -> tuple[Array, Array]:
    """Return the activation and the gradient between the stages, for this many samples."""
    first, last = model.row.chains[0]
    inputs, labels = model.batches(count)
    values = first.ask(Forward(0, 0, True, inputs), Forwarded).output
    assert values is not None
    gradient = last.ask(Forward(0, 0, True, values, labels), Forwarded).gradient
    assert gradient is not None
    for stage in (first, last):
        stage.ask(Discard(), StageDone)
    return largest(values), largest(gradient)


def largest(payload: Payload) -> Array:
    """Return the largest tensor of a bundle; the rest is negligible."""
    arrays = [array for _, array in unpack(payload, bytes_max=payload.size_bytes)]
    return max(arrays, key=lambda array: array.nbytes)


def train(model: Model, count: int) -> None:
    """Train a few steps, so that activations are no longer those of initial values."""
    for step in range(TRAINED_STEPS):
        closed = model.row.forward(step, step, *model.batches(count), train=True)
        model.row.apply(step, closed.samples)


def best(what: Callable[[], object], seconds: float) -> float:
    """Return the least CPU time of this thread in as many repetitions as fit into `seconds`; other programs
    may be busy."""
    shortest, ended = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < ended or shortest == float("inf"):
        begun = time.thread_time()
        what()
        shortest = min(shortest, time.thread_time() - begun)
    return shortest


def measured(array: Array, codec: Codec, seconds: float) -> dict[str, Any]:
    """Return the row of figures for one tensor and codec."""
    tensors = [typed(array)]
    payload, rounding = pack_measured(tensors, codec)
    size = array.nbytes
    encode = best(lambda: pack(tensors, codec), seconds)
    decode = best(lambda: unpack(payload, bytes_max=size), seconds)
    found = unpack(payload, bytes_max=size)[0][1].astype(np.float64)
    error = np.linalg.norm(found - array) / np.linalg.norm(array)
    return {
        "codec": codec,
        "ratio": round(size / len(payload.data), 2),
        "encode_MB_per_s": round(size / encode / 1e6),
        "decode_MB_per_s": round(size / decode / 1e6),
        "error": float(f"{error:.3g}"),
        "error_reported": float(f"{rounding.relative:.3g}"),
    }


def tensors(model: Model, sizes: tuple[int, ...], when: str) -> list[tuple[str, Array]]:
    """Return the tensors that cross, cut to sizes of this many MiB, with their names."""
    pair = crossing(model, -(-max(sizes) * MIB // model.sample_bytes))
    return [
        (f"{model.name} {kind} {when} {size} MiB", np.ascontiguousarray(array.reshape(-1)[: size * MIB // 4]))
        for size in sizes
        for kind, array in zip(("activation", "gradient"), pair, strict=True)
    ]


def choices(sample: Array) -> list[dict[str, Any]]:
    """Return the codec that each policy chooses for links of several rates."""
    costs = calibrate(time.thread_time, sample)
    policies: tuple[Frames, ...] = ("exact", "bfloat16", "int8", "int4")
    return [
        {"link_MB_per_s": rate / 1e6}
        | {
            frames: choose(allowed(frames, is_gradient=True), 4 * MIB, "float32", rate, costs)
            for frames in policies
        }
        for rate in LINKS
    ]


def main() -> int:
    """Measure the codecs, then show the choices."""
    flags = arguments(__doc__ or "")
    torch.set_num_threads(1)
    sizes, seconds = ((4,), 0.02) if flags.quick else (SIZES_MIB, 0.3)
    rows: list[dict[str, Any]] = []
    activation = np.empty(0)
    for make, count in ((gpt, 4), (cnn, 64)):
        model = make()
        for when in ("first", "trained"):
            if when == "trained":
                train(model, count)
            for name, array in tensors(model, sizes, when):
                rows += [{"tensor": name} | measured(array, codec, seconds) for codec in CODECS]
                if name.startswith("gpt activation trained 4"):
                    activation = array
            print(model.name, when, file=sys.stderr)
    eights = [row for row in rows if row["codec"] == "int8"]
    decided = choices(activation)
    goals = [
        Goal("int8, slowest encoding, MB/s", min(row["encode_MB_per_s"] for row in eights), ">=", SPEED_GOAL),
        Goal("int8, slowest decoding, MB/s", min(row["decode_MB_per_s"] for row in eights), ">=", SPEED_GOAL),
        Goal("int8, smallest ratio", min(row["ratio"] for row in eights), ">=", RATIO_GOAL),
        Goal("int8, largest relative error", max(row["error"] for row in eights), "<=", ERROR_MAX),
        Goal(
            "lossy codecs chosen for links above 2 GB/s",
            float(sum(row != "raw" for row in decided[0].values()) - 1),
            "<=",
            0,
        ),
    ]
    return report("codec", rows + decided, goals, as_json=flags.json)


if __name__ == "__main__":
    leave(main())
