"""The memory of a requester and a trainer for data sets of several sizes: it must not grow with the size of
the set.

    python benchmarks/data_memory.py [--mebibytes 64 1024]

A child process packs an npz or a text as a requester does (`node.content.dataset_store`), then reads
micro-batches from all parts of it as a trainer does. The figure is its peak of anonymous memory (`RssAnon`,
which excludes pages of mapped files, because the system can reclaim them at any time). The goal is under 400
MiB for each set, and at most 100 MiB more for the largest than for the smallest.
"""

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import trio

MIB = 1 << 20
SAMPLE_BYTES = 4_096
BATCHES = 200
PEAK_MIB_MAX = 400
GROWTH_MIB_MAX = 100


def write(kind: str, folder: Path, mebibytes: int) -> Path:
    """Write a data set of this size."""
    if kind == "text":
        line = b"".join(b"%d and %d\n" % (number, number * number) for number in range(40_000))[:MIB]
        with (folder / "text.txt").open("wb") as file:
            for _ in range(mebibytes):
                file.write(line)
        return folder / "text.txt"
    count = mebibytes * MIB // SAMPLE_BYTES
    for name, share in (("train", count), ("test", 64)):
        x = np.lib.format.open_memmap(folder / "x.npy", "w+", np.float32, (share, SAMPLE_BYTES // 4))
        x[:] = np.arange(SAMPLE_BYTES // 4, dtype=np.float32)
        np.savez(folder / f"{name}.npz", x=x, y=np.arange(share) % 10)
    (folder / "x.npy").unlink()
    return folder


def anonymous_mib() -> float:
    """Return the anonymous memory of this process now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    return 0.0


def child(path: Path, folder: Path, window: int) -> None:
    """Pack and read a set; print the peak memory of each step."""
    from node.content.dataset_store import DataFiles
    from node.content.datasets import Batches
    from node.executor import RealExecutor
    from node.seams import RealClock, Seams
    from node.storage.blobs import Blobs
    from node.storage.folder import FolderStorage

    peak = [anonymous_mib()]

    def watch() -> None:
        while True:
            peak[0] = max(peak[0], anonymous_mib())
            time.sleep(0.02)

    threading.Thread(target=watch, daemon=True).start()
    storage = FolderStorage(folder)

    class NoNetwork:
        peer = b"me"

    def fail(*given: object) -> None:
        raise AssertionError(given)

    def ignore(*given: object) -> None:  # nothing is fetched, because all data is here
        del given

    async def run() -> None:
        nothing = cast("Any", None)
        seams = Seams(cast("Any", NoNetwork()), RealClock(), Random(1), nothing, RealExecutor(), storage)
        began = time.monotonic()
        files = DataFiles(seams, Blobs(storage), refuse=fail, start_task=ignore)
        dataset = await files.learn(path, window=window)
        packed, seconds, peak[0] = peak[0], time.monotonic() - began, 0.0
        found = await files.load(cast("Any", SimpleNamespace(data=dataset.digest, window=window)), [])
        columns = [("x", "int64" if window else "float32")], [("y", "int64")]
        batches = Batches(found, microbatch=16, seed=1, inputs=columns[0], labels=columns[1])
        for number in range(BATCHES):
            batches.train(number)
        print(f"{packed:.0f} {peak[0]:.0f} {seconds:.1f}")

    trio.run(run)


def main() -> int:
    """Measure each kind and size; return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=int, nargs="+", default=[64, 1_024])
    parser.add_argument("--child", nargs=3)
    given = parser.parse_args()
    if given.child:
        child(Path(given.child[0]), Path(given.child[1]), int(given.child[2]))
        return 0
    missed = False
    for kind in ("npz", "text"):
        peaks = []
        for mebibytes in given.mebibytes:
            with tempfile.TemporaryDirectory() as data, tempfile.TemporaryDirectory() as node:
                path = write(kind, Path(data), mebibytes)
                window = "256" if kind == "text" else "0"
                command = [sys.executable, __file__, "--child", str(path), node, window]
                said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
            packed, read = float(said[0]), float(said[1])
            peaks.append(max(packed, read))
            sys.stdout.write(
                f"{kind:5} {mebibytes:6} MiB: requester {packed:.0f} MiB, trainer {read:.0f} MiB, "
                f"packed in {said[2]} s\n"
            )
        missed |= max(peaks) > PEAK_MIB_MAX or peaks[-1] - peaks[0] > GROWTH_MIB_MAX
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
