"""Compares averaging by whole nodes with torch's gloo all-reduce: 4 and 8 processes, float32 vectors, several
codecs.

Each process runs a node (encrypted and authenticated streams, commitments, checks) and a gloo rank. The two
take turns on the same vectors. A ratio is the median of the ratios of the turns, so that other load on the
machine cancels out. Seconds are from the trigger until the last process is done, including the forming of the
group. Peak memory is the growth of a process within a round, in multiples of the vector, including the vector
itself. gloo sends plain values over plain sockets, so it is a lower bound, not a rival. hivemind takes its
turns too if PEERLOOM_HIVEMIND names the folders with it and with the numpy that it needs (see
`dht_sockets.py`). It is timed from its `step()`, and also from the trigger with a group that was formed
before.
"""

import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from _figures import Goal, arguments, leave, report

from crypto.contact import parse_address
from gossip.averaging.aggregates import DEFAULT
from node import config
from node.averaging.rounds import RoundWish
from node.averaging.signature import signature_of
from node.library.sync import sync

FULL = [(processes, millions) for processes in (4, 8) for millions in (1, 10, 50)]
QUICK = [(4, 1), (4, 4)]
CODECS = ("float32", "bfloat16", "int8", "int4")
ROBUST = "float32 with the rule of a keyless swarm"
"""The label of "float32" with the rule of a swarm without a key, which tolerates liars."""
GLOO = "gloo"
HIVEMIND = os.environ.get("PEERLOOM_HIVEMIND", "")
RIVALS = {"hivemind": False, "hivemind, group formed": True}
"""The rivals, and whether the group is formed before the trigger."""
RATIO_GOALS = {10: 2.5, 50: 2.0}
RIVAL_GOAL = 5.0
MEMORY_GOAL, INT8_GOAL = 3.3, 0.01
ROBUST_GOAL = 1.15
"""Maximum time relative to a round by the mean in the same turn: the cost of the rule without liars."""
TURNS = 3
ANSWER_SECONDS = 300.0


def settings(folder: str, number: int, seed: str) -> config.Config:
    return config.Config(
        name=f"n{number}",
        data_dir=Path(folder) / str(number),
        swarm=config.SwarmSettings(name="benchmark", preset="local"),
        listen=config.Listen(addresses=(config.read_listen("127.0.0.1:0"),)),
        join=config.JoinSettings(lan=False, seeds=(parse_address(seed),) if seed else ()),
        resources=config.Resources(calibrate=False),  # calibration would disturb the measurement
    )


def peer(pipe: Connection, folder: str, number: int, processes: int, rendezvous: str) -> None:
    """Run one process: a node and a gloo rank, which execute requests from the pipe."""
    import torch
    import torch.distributed as gloo

    torch.set_num_threads(1)
    gloo.init_process_group("gloo", f"file://{rendezvous}", rank=number, world_size=processes)
    with sync(settings(folder, number, pipe.recv())) as me:
        pipe.send(me.addresses[0])
        me.wait_for_members(processes - 1, 120)
        runs: dict[tuple[int, bool], Any] = {}
        portal = me._portal
        while (order := pipe.recv()) is not None:
            kind, items = order
            vector = np.random.default_rng(number).standard_normal(items, np.float32)
            run = items, kind == ROBUST
            if run not in runs and kind != GLOO:
                rule = DEFAULT if kind == ROBUST else "mean"
                signature = signature_of(f"benchmark, {rule}", [("v", (items,), "float32")])
                opened = partial(portal.subject.averaging.open, f"b{items} {rule}", signature, aggregate=rule)
                runs[run] = portal.call_sync(opened)
                portal.run(runs[run].wait_for_peers, processes - 1)
            before = reset_peak()
            pipe.send("ready")
            pipe.recv()
            begun = time.perf_counter()
            if kind == GLOO:
                tensor = torch.from_numpy(vector)
                gloo.all_reduce(tensor)
                vector, error = tensor.div_(processes).numpy(), ""
            else:
                codec = "float32" if kind == ROBUST else kind
                wanted = RoundWish(codec=codec, size_min=processes, window_seconds=30.0)
                made = portal.run(runs[run].average, vector, 1.0, wanted)
                vector, error = (vector if made.vector is None else made.vector), made.error
            seconds = time.perf_counter() - begun
            pipe.send((seconds, (peak_bytes() - before) / (4 * items) + 1, vector[:100_000].copy(), error))
            del vector
    gloo.destroy_process_group()


def reset_peak() -> int:
    """Reset the peak memory size of this process; return its current size in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def peak_bytes() -> int:
    """Return the peak memory size of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def answer(pipe: Connection) -> Any:
    if not pipe.poll(ANSWER_SECONDS):
        raise TimeoutError("a process did not answer")
    return pipe.recv()


def turn(pipes: list[Connection], kind: str, items: int) -> tuple[float, float, float]:
    """Average once; return the seconds until the last process is done, the largest peak in vectors, and the
    RMS error."""
    for pipe in pipes:
        pipe.send((kind, items))
    for pipe in pipes:
        answer(pipe)
    for pipe in pipes:
        pipe.send("go")
    results = [answer(pipe) for pipe in pipes]
    errors = [error for _, _, _, error in results if error]
    if errors:
        raise RuntimeError(f"{kind}: {errors[0]}")
    shown = min(items, 100_000)
    rms = float(np.sqrt(np.mean((results[0][2] - truth(len(pipes), items, shown)) ** 2)))
    return max(result[0] for result in results), max(result[1] for result in results), rms


class Hivemind:
    """Hivemind's averagers, as many as there are nodes, for vectors of one size."""

    def __init__(self, processes: int, millions: int) -> None:
        script = Path(__file__).with_name("_hivemind_averager.py")
        command = [sys.executable, str(script)]
        self._processes = [
            subprocess.Popen(
                [*command, str(number), str(processes), str(millions)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=os.environ | {"PYTHONPATH": HIVEMIND},
            )
            for number in range(processes)
        ]
        self._items = millions * 10**6
        seeds: list[str] = []
        for process in self._processes:
            self._tell(process, seeds=seeds)
            addresses = self._answer(process)["addresses"]
            seeds = seeds or addresses

    def turn(self, *, is_grouped: bool) -> tuple[float, float, float]:
        """Average once, like the function `turn`; memory is not measured."""
        for process in self._processes:
            self._tell(process, is_grouped=is_grouped)
        for process in self._processes:
            self._answer(process)
        for process in self._processes:
            self._tell(process)
        results = [self._answer(process) for process in self._processes]
        if any(result["group"] != len(self._processes) for result in results):
            raise RuntimeError("hivemind: the averagers were not all in one group")
        shown = np.array(results[0]["shown"])
        rms = float(np.sqrt(np.mean((shown - truth(len(results), self._items, len(shown))) ** 2)))
        return max(result["seconds"] for result in results), 0.0, rms

    def close(self) -> None:
        """End the processes, which do not always end by themselves."""
        for process in self._processes:
            process.stdin.close()  # type: ignore[union-attr]  # it has pipes
        for process in self._processes:
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()

    def _tell(self, process: "subprocess.Popen[str]", **order: Any) -> None:
        process.stdin.write(json.dumps(order) + "\n")  # type: ignore[union-attr]  # it has pipes
        process.stdin.flush()  # type: ignore[union-attr]  # it has pipes

    def _answer(self, process: "subprocess.Popen[str]") -> Any:
        return json.loads(process.stdout.readline())  # type: ignore[union-attr]  # it has pipes


def truth(processes: int, items: int, shown: int) -> Any:
    """Return the first elements of the true mean."""
    vectors = [
        np.random.default_rng(number).standard_normal(items, np.float32)[:shown].astype(np.float64)
        for number in range(processes)
    ]
    return np.mean(vectors, axis=0)


def measure(processes: int, sizes: list[int], turns: int, rows: list[dict[str, Any]]) -> None:
    """Measure all sizes with this many processes."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes: list[Connection] = []
        children = []
        for number in range(processes):
            ours, theirs = context.Pipe()
            child = context.Process(
                target=peer, args=(theirs, folder, number, processes, f"{folder}/gloo"), daemon=True
            )
            child.start()
            pipes.append(ours)
            children.append(child)
        seed = ""
        for pipe in pipes:
            pipe.send(seed)
            address = answer(pipe)
            seed = seed or address
        for millions in sizes:
            found: dict[str, list[tuple[float, float, float]]] = {}
            rival = Hivemind(processes, millions) if HIVEMIND else None
            for _ in range(turns):
                for kind in (GLOO, *CODECS, ROBUST):
                    found.setdefault(kind, []).append(turn(pipes, kind, millions * 10**6))
                if rival is not None:
                    for kind, is_grouped in RIVALS.items():
                        found.setdefault(kind, []).append(rival.turn(is_grouped=is_grouped))
            if rival is not None:
                rival.close()
            for kind, taken in found.items():
                ratios = [ours[0] / floor[0] for ours, floor in zip(taken, found[GLOO], strict=True)]
                means = [ours[0] / mean[0] for ours, mean in zip(taken, found["float32"], strict=True)]
                seconds = statistics.median(each[0] for each in taken)
                rows.append(
                    {
                        "processes": processes,
                        "millions": millions,
                        "codec": kind,
                        "seconds": round(seconds, 4),
                        "megabytes_per_second": round(4 * millions / seconds, 1),
                        "times_gloo": round(statistics.median(ratios), 2),
                        "times_float32": round(statistics.median(means), 2),
                        "rms_error": taken[0][2],
                        "peak_vectors": round(max(each[1] for each in taken), 2),
                    }
                )
        for pipe in pipes:
            pipe.send(None)
        for child in children:
            child.join(30)


def goals_of(rows: list[dict[str, Any]]) -> list[Goal]:
    """Return the goals for the figures."""
    goals = []
    for row in rows:
        where = f"{row['processes']} x {row['millions']}M {row['codec']}"
        if row["codec"] == "float32" and row["millions"] in RATIO_GOALS:
            bound = RATIO_GOALS[row["millions"]]
            goals.append(Goal(f"{where}, time relative to gloo", row["times_gloo"], "<=", bound))
        if row["codec"] == "float32" and row["millions"] >= 10:
            goals.append(
                Goal(
                    f"{where}, peak memory in multiples of the vector", row["peak_vectors"], "<=", MEMORY_GOAL
                )
            )
        if row["codec"] == "float32":
            goals.append(Goal(f"{where}, RMS error", row["rms_error"], "<=", 1e-6))
        if row["codec"] == ROBUST and row["millions"] >= 4:
            goals.append(Goal(f"{where}, time relative to the mean", row["times_float32"], "<=", ROBUST_GOAL))
        if row["codec"] == "int8":
            goals.append(Goal(f"{where}, RMS error", row["rms_error"], "<=", INT8_GOAL))
    seconds = {(row["processes"], row["millions"], row["codec"]): row["seconds"] for row in rows}
    for (processes, millions, codec), theirs in seconds.items():
        if codec in RIVALS:
            ratio = round(theirs / seconds[processes, millions, "float32"], 2)
            goals.append(
                Goal(f"{processes} x {millions}M, times faster than {codec}", ratio, ">=", RIVAL_GOAL)
            )
    return goals


def main() -> None:
    """Run the benchmark."""
    numbers = {
        "processes": ("measure only these numbers of processes"),
        "millions": ("measure only these sizes, in millions"),
    }
    options = arguments("averaging by whole nodes compared with gloo", numbers)
    rows: list[dict[str, Any]] = []
    shapes = QUICK if options.quick else FULL
    if options.processes or options.millions:
        counts, sizes = options.processes or (4, 8), options.millions or (1, 10, 50)
        shapes = [(count, size) for count in counts for size in sizes]
    for processes in sorted({count for count, _ in shapes}):
        sizes = [millions for count, millions in shapes if count == processes]
        measure(processes, sizes, 1 if options.quick else TURNS, rows)
    leave(report("averaging", rows, goals_of(rows), as_json=options.json))


if __name__ == "__main__":
    main()
