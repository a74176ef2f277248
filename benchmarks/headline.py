"""CloudMesh's experiment here: one machine compared with 2 and 4 providers, over paired seeds, with
intervals.

    make headline                            everything; what is in headline-out/ is not made again
    python benchmarks/headline.py --quick    three seeds of one epoch, without processes or a page

Four parts, each of which may run alone (`--part`): `members` trains twenty seeds of each row without a
network (`_headline_members`); `nodes` trains whole nodes in virtual time; `processes` times real nodes under
quotas of CPU time (`_headline_nodes`); `page` writes docs/headline.md and its pictures. Settings were chosen
on a fifth of the training samples, with other seeds than those shown, and never on the held-out samples.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
from _figures import Goal, leave, report
from _headline_members import Data, Way, train
from _headline_page import Table, ratios, write_page

from node.content.datasets import load_digits
from node.content.images import CIFAR_CLASSES, CIFAR_SHAPE
from node.content.sources import convert

OUT = Path(__file__).parents[1] / "headline-out"
PARTS = ("members", "nodes", "processes", "page")
SEEDS, IMAGE_SEEDS, SHUFFLES, SHUFFLES_OF_THE_GOAL = 20, 5, 40, 10
EPOCHS, IMAGE_EPOCHS = 10, 5
ONE = "1 machine"
TWO, FOUR = "2, every 10 batches, rate x2", "4, every 5 batches, rate x3"
WAYS = {
    ONE: Way(),
    "2, once an epoch": Way(2),
    "2, every 64 batches": Way(2, 64),
    "2, asynchronous, every 64": Way(2, 64, "asynchronous", waits=False),
    TWO: Way(2, 10, rate=0.002),
    "2, asynchronous, every 5, rate x2": Way(2, 5, "asynchronous", waits=False, rate=0.002),
    "4, once an epoch": Way(4),
    "4, every 64 batches": Way(4, 64),
    "4, asynchronous, every 64": Way(4, 64, "asynchronous", waits=False),
    FOUR: Way(4, 5, rate=0.003),
    "4, once an epoch, steps of one machine": Way(4, same_steps=True),
}
"""The ways to train. All use the same number of samples, except the last. The first way of each count is the
report's."""
IMAGE_WAYS = (ONE, "2, once an epoch", TWO, "4, once an epoch", FOUR)
RATIO_GOALS = {TWO: 0.995, FOUR: 0.99}
RATIO_WAYS = (ONE, TWO, FOUR)
SPREAD_GOAL = 0.02


def digits() -> Data:
    """Return scikit-learn's digits."""
    found = load_digits()
    parts = [
        (np.ascontiguousarray(part["x"], np.float32), np.asarray(part["y"]))
        for part in (found.train, found.test)
    ]
    return Data("digits", parts[0], parts[1])


def write_images(folder: Path, samples: int, held_out: int, seed: int = 1) -> None:
    """Write a generated set in CIFAR-10's binary form: each class has a smooth coloured pattern, which is
    shifted and weakened, under noise and a pattern of a different class."""
    draws = np.random.default_rng(seed)
    coarse = draws.standard_normal((CIFAR_CLASSES, 3, 8, 8))
    patterns = coarse.repeat(4, axis=2).repeat(4, axis=3)
    for name, count in (("data_batch_1.bin", samples), ("test_batch.bin", held_out)):
        labels = draws.integers(0, CIFAR_CLASSES, count)
        rows = bytearray()
        for label in labels:
            other = patterns[draws.integers(0, CIFAR_CLASSES)]
            own = np.roll(patterns[label], tuple(draws.integers(-4, 5, 2)), (1, 2))
            image = draws.uniform(0.4, 1) * own + 0.4 * other + 0.9 * draws.standard_normal(CIFAR_SHAPE)
            rows += bytes([label]) + np.clip(128 + 36 * image, 0, 255).astype(np.uint8).tobytes()
        (folder / name).write_bytes(rows)


def images(samples: int = 1_000, held_out: int = 500) -> Data:
    """Return the generated set, read as a run reads a folder of CIFAR-10."""
    with tempfile.TemporaryDirectory() as made, tempfile.TemporaryDirectory() as read:
        write_images(Path(made), samples, held_out)
        convert(made, Path("/"), Path(read))
        parts = []
        for name in ("train", "test"):
            with np.load(Path(read) / f"{name}.npz", allow_pickle=False) as file:
                parts.append((np.ascontiguousarray(file["x"], np.float32), np.asarray(file["y"])))
    return Data("images", parts[0], parts[1])


def kept(path: Path) -> Iterator[dict[str, Any]]:
    """Yield earlier measurements, one JSON object per line."""
    if path.exists():
        for line in path.read_text().splitlines():
            yield json.loads(line)


def measure(path: Path, key: dict[str, Any], make: Callable[[], dict[str, Any]]) -> None:
    """Measure a figure if it is missing, and save it immediately."""
    if any(key.items() <= row.items() for row in kept(path)):
        return
    row = key | make()
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps({name: value for name, value in row.items() if name != "confusion"}), flush=True)


def members(seeds: range, epochs: int, out: Path, *, with_images: bool) -> None:
    """Measure twenty seeds of each way on digits, ten shuffles, and some seeds on images."""
    path = out / f"members-{seeds.start}.jsonl"
    data = digits()

    def row(data: Data, name: str, seed: int, epochs: int, shuffle: int | None) -> dict[str, Any]:
        found = train(data, WAYS[name], seed, epochs, look=seed == 0 and shuffle is None, shuffle=shuffle)
        confusion = None if seed or found.confusion is None else found.confusion.tolist()
        return {"accuracy": found.accuracy, "curve": found.curve, "confusion": confusion}

    # The ways with goals come first, for people who stop this half way.
    for name in (*RATIO_WAYS, *(way for way in WAYS if way not in RATIO_WAYS)):
        for seed in seeds:
            key = {"data": "digits", "way": name, "seed": seed, "shuffle": None}
            measure(path, key, partial(row, data, name, seed, epochs, None))
    if seeds.start == 0:
        for shuffle in range(SHUFFLES if with_images else 2):
            for name in RATIO_WAYS:
                key = {"data": "digits", "way": name, "seed": 0, "shuffle": shuffle}
                measure(path, key, partial(row, data, name, 0, epochs, shuffle))
    if with_images:
        data = images()
        for seed in (seed for seed in seeds if seed < IMAGE_SEEDS):
            for name in IMAGE_WAYS:
                key = {"data": "images", "way": name, "seed": seed, "shuffle": None}
                measure(path, key, partial(row, data, name, seed, IMAGE_EPOCHS, None))


def goals(rows: list[dict[str, Any]]) -> list[Goal]:
    """Return the goals for the measurements."""
    found = []
    for name, bound in RATIO_GOALS.items():
        if values := ratios(rows, "digits", name, ONE):
            found.append(Goal(f"accuracy ratio, {name}", float(np.mean(values)), ">=", bound))
    for name in RATIO_WAYS:
        shuffled = [row["accuracy"] for row in rows if row["way"] == name and row["shuffle"] is not None]
        shuffled = shuffled[:SHUFFLES_OF_THE_GOAL]
        if shuffled:
            spread = max(shuffled) - min(shuffled)
            found.append(Goal(f"spread of {len(shuffled)} shuffles, {name}", spread, "<=", SPREAD_GOAL))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="three seeds of one epoch, without a page")
    parser.add_argument("--part", choices=PARTS, help="this part alone")
    parser.add_argument("--seeds", default=f"0-{SEEDS - 1}", help="of the members, such as 0-9")
    options = parser.parse_args()
    if options.quick:
        with tempfile.TemporaryDirectory() as folder:
            members(range(3), 1, Path(folder), with_images=False)
            rows = list(kept(Path(folder) / "members-0.jsonl"))
        ways = [{"way": row["way"], "seed": row["seed"], "accuracy": row["accuracy"]} for row in rows]
        report("headline", ways, [], as_json=options.json)
        return 0
    OUT.mkdir(exist_ok=True)
    first, last = map(int, options.seeds.split("-"))
    if options.part in (None, "members"):
        members(range(first, last + 1), EPOCHS, OUT, with_images=True)
    if options.part in (None, "nodes", "processes"):
        import _headline_nodes  # imported here, because it loads whole nodes

        if options.part != "processes":
            _headline_nodes.play_nodes(lambda key, make: measure(OUT / "nodes.jsonl", key, make))
        if options.part != "nodes":
            _headline_nodes.play_processes(
                lambda key, make: measure(OUT / "processes.jsonl", key, make), write_images
            )
    rows = [row for path in sorted(OUT.glob("members-*.jsonl")) for row in kept(path)]
    table = Table(
        rows,
        list(kept(OUT / "nodes.jsonl")),
        list(kept(OUT / "processes.jsonl")),
        tuple(WAYS),
        ONE,
        TWO,
        FOUR,
    )
    found = [*goals(rows), *table.goals()]
    if options.part in (None, "page"):
        write_page(table, found)
    return report("headline", [], found, as_json=options.json)


if __name__ == "__main__":
    leave(main())
