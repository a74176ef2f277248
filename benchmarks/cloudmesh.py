"""CloudMesh's measurements other than its headline: new partitions, a federated baseline, real nodes.

    python benchmarks/cloudmesh.py                    everything, and docs/partitions.md; what is in
                                                      cloudmesh-out/ is not made again
    python benchmarks/cloudmesh.py --part PART        one of those below
    python benchmarks/cloudmesh.py --quick            two partitions of one epoch

Parts: `partitions` makes ten new partitions of train and test together, unbalanced; `images` trains members
on a generated set of CIFAR's shape and difficulty; `virtual` times 1, 2 and 4 whole nodes in virtual time;
`nodes` trains 1, 2 and 4 real nodes with one thread each on the generated set.

A *partition* deals train and test samples together again, with some classes held out more often than others;
it is more than a new order. The *federated baseline* is a simulation in one machine, as in the report:
clients train one after another, and a server averages. Our settings on digits are those of docs/headline.md.
Every time is shown with the load of the machine, because on a shared machine seconds alone mean little.
"""

import argparse
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from textwrap import wrap
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from _figures import Goal, leave, report
from _headline_members import Data, Way, train
from _headline_page import interval
from headline import digits, kept, measure

from node.content.images import CIFAR_CLASSES, CIFAR_SHAPE
from node.content.sources import convert

ROOT = Path(__file__).parents[1]
OUT = ROOT / "cloudmesh-out"
PARTS = ("partitions", "images", "virtual", "nodes")
PARTITIONS, SEEDS = 10, 5
EPOCHS, IMAGE_EPOCHS = 10, 10
ONE, FEDERATED, TWO, FOUR = "1 machine", "federated, 2 clients in 1 machine", "2, ours", "4, ours"
WAYS = {
    ONE: Way(),
    TWO: Way(2, 10, rate=0.002),
    FOUR: Way(4, 5, rate=0.003),
    FEDERATED: Way(2, is_centralised=True, same_steps=True),
}
"""The ways to train. A client of the baseline makes as many steps as one machine, because the report's
clients took four times as long."""
IMAGE_WAYS = WAYS | {TWO: Way(2, 10), FOUR: Way(4, 5, rate=0.0014)}
"""The ways to train on images, chosen on a fifth of the training images and a different seed, with members
alone."""
SAMPLES, HELD_OUT = 2_000, 1_000
NOISE = 1.6
"""Strength of the noise: enough that one machine reaches 70 to 80 %, as in the report on CIFAR-10."""
RATIO_GOAL, SPEED_GOAL = 0.99, 1.5
NODES = (("1 node", "a", 10, 1), ("2 nodes", "ab", 10, 2), ("4 nodes", "abcd", 5, 3))
"""Rows of name, nodes, local steps, factor of the learning rate."""
IMAGE_NODES = (("1 node", "a", 10, 1.0), ("2 nodes", "ab", 10, 1.0), ("4 nodes", "abcd", 5, 1.4))
VIRTUAL_STEPS = 400


def write_hard_images(folder: Path, samples: int, held_out: int, seed: int = 1) -> None:
    """Write a generated set in CIFAR-10's binary form and of its difficulty: each class has a coloured
    pattern, which is shifted, mirrored and weakened, under a pattern of a different class and much noise."""
    draws = np.random.default_rng(seed)
    patterns = draws.standard_normal((CIFAR_CLASSES, 3, 8, 8)).repeat(4, axis=2).repeat(4, axis=3)
    for name, count in (("data_batch_1.bin", samples), ("test_batch.bin", held_out)):
        rows = bytearray()
        for label in draws.integers(0, CIFAR_CLASSES, count):
            own = np.roll(patterns[label], tuple(draws.integers(-4, 5, 2)), (1, 2))
            own = own[:, :, ::-1] if draws.random() < 0.5 else own
            other = patterns[draws.integers(0, CIFAR_CLASSES)]
            image = draws.uniform(0.4, 1) * own + 0.4 * other + NOISE * draws.standard_normal(CIFAR_SHAPE)
            rows += bytes([label]) + np.clip(128 + 30 * image, 0, 255).astype(np.uint8).tobytes()
        (folder / name).write_bytes(rows)


def hard_images() -> Data:
    """Return the generated set, read as a run reads a folder of CIFAR-10."""
    with tempfile.TemporaryDirectory() as made, tempfile.TemporaryDirectory() as read:
        write_hard_images(Path(made), SAMPLES, HELD_OUT)
        convert(made, Path("/"), Path(read))
        parts = []
        for name in ("train", "test"):
            with np.load(Path(read) / f"{name}.npz", allow_pickle=False) as file:
                parts.append((np.ascontiguousarray(file["x"], np.float32), np.asarray(file["y"])))
    return Data("hard images", parts[0], parts[1])


def row(data: Data, way: str, seed: int, epochs: int, ways: dict[str, Way] = WAYS) -> dict[str, Any]:
    """Return the accuracy, and the imbalance of the held-out samples: the largest class over the smallest."""
    found = train(data, ways[way], seed, epochs)
    counts = np.bincount(data.test[1])
    return {"accuracy": found.accuracy, "unbalanced": float(counts.max() / counts.min())}


def partitions(path: Path, numbers: range, epochs: int) -> None:
    data = digits()
    for number in numbers:
        for way in (ONE, FEDERATED, TWO):
            key = {"part": "partitions", "way": way, "partition": number}
            measure(path, key, partial(row, data.repartitioned(number), way, 0, epochs))


def images(path: Path, seeds: range) -> None:
    data = hard_images()
    for seed in seeds:
        for way in WAYS:
            key = {"part": "images", "way": way, "seed": seed}
            measure(path, key, partial(row, data, way, seed, IMAGE_EPOCHS, IMAGE_WAYS))


def virtual(path: Path) -> None:
    """Measure virtual seconds and accuracy of whole nodes on digits, independently of this machine's load."""
    from _headline_nodes import BATCH, LOCAL_SECONDS_MAX, RATE, STAGE_SECONDS, _outcome

    from node.events import RunEnded, StepCommitted
    from partition.run.local_settings import LocalSettings
    from partition.stage import OptimizerSettings
    from tests.stack import manifest, simulate, swarm
    from tests.stack import train as train_nodes

    def made(nodes: str, local_steps: int, times: int) -> dict[str, Any]:
        found: dict[str, Any] = {}

        async def play() -> None:
            async with swarm(nodes, stage_seconds=STAGE_SECONDS) as group:
                wanted = manifest(
                    dtype="float32",
                    steps=VIRTUAL_STEPS // len(nodes),
                    stages=1,
                    replicas=0,
                    microbatch=BATCH,
                    microbatches=1,
                    optimizer=OptimizerSettings(kind="adam", learning_rate=times * RATE),
                    local=LocalSettings(local_steps=local_steps, evaluate_every=1_000),
                )
                _, events = await train_nodes(group, "a", wanted, seconds=LOCAL_SECONDS_MAX)
                first = next(event for event in events if isinstance(event, StepCommitted))
                end = next(event for event in events if isinstance(event, RunEnded))
                found.update(_outcome(group, nodes, events), seconds=end.at - first.at + first.seconds)

        simulate(play)
        return found

    for how, nodes, local_steps, times in NODES:
        measure(path, {"part": "virtual", "how": how}, partial(made, nodes, local_steps, times))


def nodes(path: Path, seeds: range) -> None:
    """Measure real nodes of one thread each; each seed has a different generated set. Pairs run one after the
    other, and the machine's load is read before each."""
    from _headline_nodes import play_one

    for seed in seeds:
        for how, names, local_steps, times in IMAGE_NODES:
            write = partial(write_hard_images, seed=seed + 1)

            def made(
                names: str = names, local_steps: int = local_steps, times: float = times
            ) -> dict[str, Any]:
                load = os.getloadavg()[0]
                sizes = SAMPLES, HELD_OUT
                return play_one(names, IMAGE_EPOCHS, local_steps, times, write, sizes) | {"load": load}  # noqa: B023 - called at once

            measure(path, {"part": "nodes", "how": how, "seed": seed}, made)


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the mean accuracy with its interval, by part and way of training."""
    found = []
    for part in PARTS:
        names = dict.fromkeys(each.get("way") or each.get("how") for each in rows if each["part"] == part)
        for name in names:
            mine = [
                each for each in rows if each["part"] == part and name in (each.get("way"), each.get("how"))
            ]
            line = {"part": part, "how": name, "accuracy": interval([each["accuracy"] for each in mine])}
            line |= {"measured": len(mine)}
            if part == "partitions":
                values = [each["accuracy"] for each in mine]
                line |= {"unbalanced": float(np.mean([each["unbalanced"] for each in mine]))}
                line |= {
                    "lowest": min(values),
                    "highest": max(values),
                    "deviation": float(np.std(values, ddof=min(1, len(values) - 1))),
                }
            if part in ("virtual", "nodes"):
                line |= {"seconds": interval([each["seconds"] for each in mine])}
            if part == "nodes":
                line |= {"load": interval([each["load"] for each in mine])}
            found.append(line)
    return found


TITLES = {
    "partitions": "Ten new partitions of the digits",
    "images": "A generated set of CIFAR's shape",
    "virtual": "Whole nodes in virtual time",
    "nodes": "Real nodes with one thread each",
}
TEXTS = {
    "partitions": (
        "The samples of train and test are dealt again into 1,437 and 360, with some classes held out more "
        "often than others. *unbalanced* is the largest class of the held-out samples divided by the "
        "smallest, as a mean over partitions. "
        "In the report the tenth partition reached 71.96 %, and the usual one 73.70 %."
    ),
    "images": (
        f"Ten classes of 3x32x32, {SAMPLES:,} samples and {HELD_OUT:,} held out, {IMAGE_EPOCHS} epochs, "
        "members without a network. The settings were chosen on a fifth of the training images and a "
        "different seed."
    ),
    "virtual": (
        f"Digits, {VIRTUAL_STEPS} steps of 16 samples in total. A pass is modelled to take a second on every "
        "node, so the load of the machine does not affect the figures."
    ),
    "nodes": (
        "`peerloom` processes with a quota of one core each, on the generated set. Seconds are from the "
        "first step to the end of the run. *load* is the machine's load before each run; from a load of 2 "
        "on, times mean little."
    ),
}


def write_page(rows: list[dict[str, Any]]) -> None:
    """Write docs/partitions.md from the measurements."""
    lines = ["# New partitions, a federated baseline, and real nodes", ""]
    lines += wrap(
        "Made by `python benchmarks/cloudmesh.py`; do not edit. An addition to docs/headline.md, which has "
        "the report's experiment: SimpleCNN, batch 16, Adam. *Federated* is a simulation in one machine, "
        "as in the report: each client makes as many steps as one machine, one client after "
        "another, and a server averages once per epoch.",
        118,
    )
    for part, title in TITLES.items():
        lines += ["", f"## {title}", ""]
        found = [each for each in summary(rows) if each["part"] == part]
        if not found:
            lines += [f"Not measured: `python benchmarks/cloudmesh.py --part {part}`."]
            continue
        lines += wrap(TEXTS[part], 118, break_on_hyphens=False)
        names = [name for name in found[0] if name != "part"]
        lines += ["", f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
        cells = ([_cell(each[name]) for name in names] for each in found)
        lines += [f"| {' | '.join(row)} |" for row in cells]
    (ROOT / "docs" / "partitions.md").write_text("\n".join(lines) + "\n")


def _cell(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def goals(rows: list[dict[str, Any]]) -> list[Goal]:
    """Return the goals: two real nodes over one, pair by pair."""

    def ratio(part: str, of: str, over: str, what: str) -> list[float]:
        found = {
            (each.get("way") or each.get("how"), each.get("seed")): each[what]
            for each in rows
            if each["part"] == part
        }
        seeds = sorted(
            seed for name, seed in found if name == of and (over, seed) in found and seed is not None
        )
        return [found[of, seed] / found[over, seed] for seed in seeds]

    made = []
    if values := ratio("images", TWO, ONE, "accuracy"):
        made.append(Goal("accuracy ratio, 2 members, hard images", float(np.mean(values)), ">=", RATIO_GOAL))
    if values := ratio("nodes", "2 nodes", "1 node", "accuracy"):
        made.append(Goal("accuracy ratio, 2 real nodes", float(np.mean(values)), ">=", RATIO_GOAL))
        times = [1 / each for each in ratio("nodes", "2 nodes", "1 node", "seconds")]
        made.append(Goal("times as fast, 2 real nodes", float(np.mean(times)), ">=", SPEED_GOAL))
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="one partition of one epoch")
    parser.add_argument("--part", choices=PARTS, help="this part alone")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of images and nodes")
    options = parser.parse_args()
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "rows.jsonl"
            partitions(path, range(2), 1)
            report("cloudmesh", summary(list(kept(path))), [], as_json=options.json)
        return 0
    OUT.mkdir(exist_ok=True)
    path = OUT / "rows.jsonl"
    if options.part in (None, "partitions"):
        partitions(path, range(PARTITIONS), EPOCHS)
    if options.part in (None, "images"):
        images(path, range(options.seeds))
    if options.part in (None, "virtual"):
        virtual(path)
    if options.part in (None, "nodes"):
        nodes(path, range(options.seeds))
    rows = list(kept(path))
    write_page(rows)
    return report("cloudmesh", summary(rows), goals(rows), as_json=options.json)


if __name__ == "__main__":
    leave(main())
