"""Whole nodes for `benchmarks/headline.py`, in virtual time and as real processes under CPU quotas."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from quotas import Groups

from node.cli import client
from node.errors import NoNode
from node.events import RunEnded, RunEvaluated
from partition.run.local_settings import LocalSettings
from partition.stage import OptimizerSettings
from tests.stack import Swarm, manifest, reference, simulate, swarm, train, weights

Measure = Callable[[dict[str, Any], Callable[[], dict[str, Any]]], None]
ROOT = Path(__file__).parents[1]
BATCH, RATE = 16, 0.001
TOTAL_STEPS = 898
"""Ten epochs of digits."""
EXACT_STEPS = 90
EXACT = (("1 stage", "a", 1, 1), ("2 stages", "ab", 2, 1), ("4 stages", "abcd", 4, 1))
REPLICATED = (("2 replicas", "ab", 1, 2), ("4 replicas", "abcd", 1, 4))
LOCAL = (
    ("1 node", "a", 10, 1, "average"),
    ("2 nodes", "ab", 10, 2, "average"),
    ("2 nodes, asynchronous", "ab", 5, 2, "asynchronous"),
    ("4 nodes", "abcd", 5, 3, "average"),
    ("4 nodes, asynchronous", "abcd", 5, 3, "asynchronous"),
)
"""Rows of name, nodes, local steps, factor of the learning rate, strategy."""
LOCAL_SEEDS = 2
STAGE_SECONDS = 1.0
"""The modelled time of a pass, chosen so that a round of averaging takes about one pass."""
LOCAL_SECONDS_MAX = 4 * TOTAL_STEPS * STAGE_SECONDS
"""The limit in virtual time: one node alone makes all steps, and evaluates between them."""
QUOTA, FOUR_QUOTA = 0.9, 0.4
"""Cores per node: two cores carry two nodes or four nodes, in addition to this program."""
SAMPLES, HELD_OUT, EPOCHS, FOUR_EPOCHS = 1_000, 500, 32, 16
"""Sizes of the run: large, because a second node begins some eight seconds after the first, which must be a
small part of the whole."""
PROCESSES = (
    ("1 node", "a", QUOTA, EPOCHS, 10, 1, "average"),
    ("2 nodes, every 10, rate x2", "ab", QUOTA, EPOCHS, 10, 2, "average"),
    ("2 nodes, asynchronous, every 5, rate x2", "ab", QUOTA, EPOCHS, 5, 2, "asynchronous"),
    ("1 node", "a", FOUR_QUOTA, FOUR_EPOCHS, 10, 1, "average"),
    ("4 nodes, every 5, rate x3", "abcd", FOUR_QUOTA, FOUR_EPOCHS, 5, 3, "average"),
    ("4 nodes, asynchronous, every 5, rate x3", "abcd", FOUR_QUOTA, FOUR_EPOCHS, 5, 3, "asynchronous"),
)
"""Rows of name, nodes, cores per node, epochs, local steps, factor of the learning rate, strategy."""
START_SECONDS_MAX, RUN_SECONDS_MAX = 120.0, 600.0


# Virtual time


def play_nodes(measure: Measure) -> None:
    """Compare exact mode with training in one process, and play local mode."""
    for name, nodes, stages, replicas in (*EXACT, *REPLICATED):
        key = {"how": f"exact, {name}", "seed": 1, "steps": EXACT_STEPS}
        measure(key, partial(_exact, nodes, stages, replicas))
    for seed in range(LOCAL_SEEDS):
        for name, nodes, local_steps, times, strategy in LOCAL:
            key = {"how": f"local, {name}, every {local_steps}, rate x{times}", "seed": seed}
            key["steps"] = TOTAL_STEPS // len(nodes)
            measure(key, partial(_local, nodes, local_steps, times, seed, strategy))


def _exact(nodes: str, stages: int, replicas: int) -> dict[str, Any]:
    found: dict[str, Any] = {}

    async def play() -> None:
        async with swarm(nodes) as group:
            wanted = manifest(
                steps=EXACT_STEPS,
                stages=stages,
                replicas=replicas,
                microbatch=4,
                microbatches=BATCH // 4,
                optimizer=OptimizerSettings(kind="adam", learning_rate=RATE),
            )
            run, events = await train(group, "a", wanted)
            result, expected = weights(group, "a", run), reference(run)
            worst = max(float(np.abs(result[name] - expected[name]).max()) for name in expected)
            found.update(_outcome(group, nodes, events), difference=worst)

    simulate(play)
    return found


def _local(nodes: str, local_steps: int, times: int, seed: int, strategy: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}

    async def play() -> None:
        async with swarm(nodes, seed=seed + 1, stage_seconds=STAGE_SECONDS) as group:
            wanted = manifest(
                dtype="float32",
                seed=seed,
                steps=TOTAL_STEPS // len(nodes),
                stages=1,
                replicas=0,
                microbatch=BATCH,
                microbatches=1,
                optimizer=OptimizerSettings(kind="adam", learning_rate=times * RATE),
                local=LocalSettings(local_steps=local_steps, evaluate_every=20, strategy=strategy),
            )
            _, events = await train(group, "a", wanted, seconds=LOCAL_SECONDS_MAX)
            found.update(_outcome(group, nodes, events))

    simulate(play)
    return found


def _outcome(group: Swarm, nodes: str, events: list[Any]) -> dict[str, Any]:
    evaluated = [event for event in events if isinstance(event, RunEvaluated)][-1]
    ends = [event for name in nodes for event in group.events[name] if isinstance(event, RunEnded)]
    return {
        "accuracy": evaluated.accuracy,
        "same": len({end.weights for end in ends}) == 1,
        "ended": len(ends),
    }


# Real processes


def play_processes(measure: Measure, write_images: Callable[[Path, int, int], None]) -> None:
    """Compare one node with two and with four, in local mode, each pair under the same quota."""
    for how, names, quota, epochs, local_steps, times, strategy in PROCESSES:
        key = {"how": how, "quota": quota}
        measure(key, partial(_real, names, quota, epochs, local_steps, times, strategy, write_images))


def play_one(
    names: str,
    epochs: int,
    local_steps: int,
    times: float,
    write_images: Callable[[Path, int, int], None],
    samples: tuple[int, int],
) -> dict[str, Any]:
    """Train real nodes with one thread each on this many training and held-out samples."""
    return _real(names, 1.0, epochs, local_steps, times, "average", write_images, samples)


def _real(
    names: str,
    quota: float,
    epochs: int,
    local_steps: int,
    times: float,
    strategy: str,
    write_images: Callable[[Path, int, int], None],
    samples: tuple[int, int] = (SAMPLES, HELD_OUT),
) -> dict[str, Any]:
    groups = Groups()
    running: list[subprocess.Popen[bytes]] = []
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PEERLOOM_CALIBRATE": "false"}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as made:
        folder = Path(made)
        try:
            join: list[str] = []
            for name in names:
                group = groups.make(f"headline-{name}", quota)
                command = [
                    sys.executable, "-m", "node", "--data-dir", str(folder / name), "--listen", "127.0.0.1:0",
                    "--no-lan", "--name", name, "--cores", "1", "--web", "off", "--swarm", "headline", *join,
                ]  # fmt: skip
                inside = f'echo $$ > {group}/cgroup.procs && exec "$@"'
                log = (folder / f"{name}.log").open("wb")
                running.append(
                    subprocess.Popen(
                        ["sh", "-c", inside, "node", *command],
                        env=environment,
                        stdout=log,
                        stderr=log,
                        cwd=ROOT,
                    )
                )
                status = _wait(folder / name, lambda status: bool(status["addresses"]))
                join = ["--join", status["addresses"][0]]
            _wait(folder / "a", lambda status: status["members_alive"] >= len(names) - 1)
            return _run(
                folder, names, epochs, local_steps, times, strategy, write_images, samples, environment
            )
        finally:
            for process in running:
                process.terminate()
            for process in running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(30)
                if process.poll() is None:
                    process.kill()
                    process.wait()
            groups.close()


def _wait(data_dir: Path, ready: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    until = time.monotonic() + START_SECONDS_MAX
    while time.monotonic() < until:
        with contextlib.suppress(NoNode):  # not up yet
            status: dict[str, Any] = client.ask(data_dir, "status")
            if ready(status):
                return status
        time.sleep(0.5)
    raise RuntimeError(f"node {data_dir.name} is not ready")


def _run(
    folder: Path,
    names: str,
    epochs: int,
    local_steps: int,
    times: float,
    strategy: str,
    write_images: Callable[[Path, int, int], None],
    samples: tuple[int, int],
    environment: dict[str, str],
) -> dict[str, Any]:
    (folder / "images").mkdir()
    write_images(folder / "images", *samples)
    steps = epochs * samples[0] // BATCH // len(names)
    (folder / "run.toml").write_text(
        f'model = "simple-cnn"\ndata = "images"\n[train]\nsteps = {steps}\nbatch = {BATCH}\n'
        f'microbatch = {BATCH}\nlearning_rate = {times * RATE}\nmode = "local"\nlocal_steps = {local_steps}\n'
        f'strategy = "{strategy}"\nevaluate_every = 1000\n'
    )
    begun = time.time()
    done = subprocess.run(
        [sys.executable, "-m", "node", "train", str(folder / "run.toml"), "--json",
         "--data-dir", str(folder / "a")],
        capture_output=True, text=True, cwd=ROOT, env=environment, timeout=RUN_SECONDS_MAX, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-800:])
    events = [json.loads(line) for line in done.stdout.splitlines()]
    first = next(event for event in events if event.get("kind") == "StepCommitted")
    end = next(event for event in events if event.get("kind") == "RunEnded")
    ended = datetime.fromisoformat(end["at"]).timestamp()
    start = datetime.fromisoformat(first["at"]).timestamp() - first["seconds"]
    told = subprocess.run(
        [sys.executable, "-m", "node", "events", "--kind", "AveragingEnded", "--json",
         "--data-dir", str(folder / "a")],
        capture_output=True, text=True, cwd=ROOT, env=environment, timeout=START_SECONDS_MAX, check=True,
    )  # fmt: skip
    rounds = sum(json.loads(line)["outcome"] == "ok" for line in told.stdout.splitlines())
    return {
        "seconds": ended - start,
        "whole": ended - begun,
        "steps": steps,
        "rounds": rounds,
        "accuracy": events[-1]["accuracy"],
    }
