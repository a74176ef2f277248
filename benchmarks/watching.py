"""How much a computing node is slowed by being watched: its page with five watchers, metrics and traces, on
compared with off.

Two nodes, each alone in a separate swarm, train the same model. One has no page. The other has one with five
open streams, is scraped every second, and is asked for the trace of its newest step before every turn (spans
are always recorded). They take turns: while one computes, the other's processes are stopped, so within
seconds both see the same machine. Each pair of turns compares steps per second, and the processor time per
step, which other programs on a busy machine disturb less.
"""

import contextlib
import os
import signal
import socket
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from _figures import Goal, arguments, leave, report

from node.cli.client import GoneAway, NodeRefused, ask, request
from node.demo.capture_process import Capturing
from node.demo.processes import SwarmProcesses

WATCHERS = 5
TURN_SECONDS, SETTLE_SECONDS = 5.0, 0.5
START_SECONDS_MAX = 120.0
RUN_FILE = """\
model = "simple-cnn"
data = "digits"
[train]
steps = 1000000
batch = 128
microbatch = 16
optimizer = "adam"
learning_rate = 0.001
[plan]
stages = 1
replicas = 1
"""


class Trained:
    """One node that trains alone, and only within `turn`."""

    def __init__(self, folder: Path, name: str, *, is_watched: bool) -> None:
        self.name = name
        self._swarm = SwarmProcesses(
            folder, f"watching-{name}", time.sleep, with_page=name if is_watched else ""
        )
        self._is_watched = is_watched
        self._streams: list[socket.socket] = []
        self.told_bytes = self.scrapes = self.traces = 0

    def start(self, capturing: Capturing) -> None:
        self._swarm.launch([self.name])
        node = self._swarm.start(self.name, None)
        self._folder, self._pid = node.data_dir, node.process.pid
        self._process = psutil.Process(self._pid)
        told = capturing.wait(lambda: time.sleep(0.05))

        def train() -> None:
            with contextlib.suppress(GoneAway, NodeRefused):
                for _ in request(self._folder, "train", told, seconds=None):
                    pass

        threading.Thread(target=train, daemon=True).start()
        until = time.monotonic() + START_SECONDS_MAX
        while self._step() < 3:
            self._swarm.check()
            assert time.monotonic() < until, "the node does not train"
            time.sleep(0.2)
        if self._is_watched:
            self._open()
        os.killpg(self._pid, signal.SIGSTOP)

    def _run(self) -> dict[str, Any]:
        runs = ask(self._folder, "status")["runs"]
        return runs[0] if runs else {}

    def _step(self) -> int:
        return int(self._run().get("step") or 0)

    def _open(self) -> None:
        address = ask(self._folder, "status")["page"]
        self._address = address
        host = address.removeprefix("http://")
        for _ in range(WATCHERS):
            stream = socket.create_connection((host.split(":")[0], int(host.split(":")[1])))
            stream.sendall(f"GET /api/stream HTTP/1.1\r\nhost: {host}\r\n\r\n".encode())
            self._streams.append(stream)
            threading.Thread(target=self._read, args=(stream,), daemon=True).start()

    def _read(self, stream: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := stream.recv(1 << 16):
                self.told_bytes += len(data)

    def turn(self, seconds: float) -> tuple[float, float]:
        """Compute for this long; return steps per second, and processor seconds per step."""
        os.killpg(self._pid, signal.SIGCONT)
        try:
            time.sleep(SETTLE_SECONDS)
            if self._is_watched:
                self._trace()
            step, cpu, begun = self._step(), self._cpu(), time.perf_counter()
            if self._is_watched:
                self._look(begun + seconds)
            time.sleep(max(0.0, begun + seconds - time.perf_counter()))
            steps, used, took = self._step() - step, self._cpu() - cpu, time.perf_counter() - begun
        finally:
            os.killpg(self._pid, signal.SIGSTOP)
        return steps / took, used / max(1, steps)

    def _trace(self) -> None:
        """Request a trace, as a person does occasionally, outside the measured time."""
        ask(self._folder, "runs.trace", {"run": self._run()["run"], "steps": 1}, seconds=20)
        self.traces += 1

    def _look(self, until: float) -> None:
        while time.perf_counter() < until - 0.2:
            urllib.request.urlopen(f"{self._address}/metrics", timeout=20).read()
            self.scrapes += 1
            time.sleep(min(1.0, max(0.0, until - time.perf_counter())))

    def _cpu(self) -> float:
        found = [self._process, *self._process.children(recursive=True)]
        return sum(sum(each.cpu_times()[:2]) for each in found)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError, AttributeError):
            os.killpg(self._pid, signal.SIGCONT)
        for stream in self._streams:
            stream.close()
        self._swarm.close()


def main() -> int:
    flags = arguments(__doc__ or "")
    pairs, seconds = (2, 3.0) if flags.quick else (16, TURN_SECONDS)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="peerloom-watching-") as folder:
        path = Path(folder)
        (path / "RUN.toml").write_text(RUN_FILE)
        capturing = Capturing(path / "RUN.toml", path / "model.peerloom")
        (path / "off").mkdir()
        (path / "on").mkdir()
        off, on = Trained(path / "off", "off", is_watched=False), Trained(path / "on", "on", is_watched=True)
        try:
            capturing.start()
            off.start(capturing)
            on.start(capturing)
            for number in range(pairs):
                found = {each.name: each.turn(seconds) for each in ((off, on) if number % 2 else (on, off))}
                rows.append(
                    {
                        "pair": number,
                        "steps_off": round(found["off"][0], 2),
                        "steps_on": round(found["on"][0], 2),
                        "rate": round(found["on"][0] / max(1e-9, found["off"][0]), 4),
                        "cpu_off": round(found["off"][1], 4),
                        "cpu_on": round(found["on"][1], 4),
                        "cpu": round(found["off"][1] / max(1e-9, found["on"][1]), 4),
                    }
                )
        finally:
            capturing.close()
            off.close()
            on.close()
    told = {"told_bytes": on.told_bytes, "scrapes": on.scrapes, "traces": on.traces}
    rows.append({"pair": "all", "rate": median(row["rate"] for row in rows), **told})
    return report(
        "watching",
        rows,
        [
            Goal("rate with the page relative to without, median of pairs", rows[-1]["rate"], ">=", 0.98),
            Goal(
                "processor time per step, without the page relative to with, median",
                median(row["cpu"] for row in rows[:-1]),
                ">=",
                0.98,
            ),
        ],
        as_json=flags.json,
    )


if __name__ == "__main__":
    leave(main())
