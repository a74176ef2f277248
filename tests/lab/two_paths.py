"""The program of two machines that share a slow and a fast network: they average, and one sends its state.

python -m tests.lab.two_paths DATA_DIR first start, average, train until the other has the state python -m
tests.lab.two_paths DATA_DIR second ADDRESS join, average, take over the state

Each prints lines of JSON: the bytes per second that all interfaces together received during a transfer.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import node

PARAMETERS = 4_000_000
"""16 MB of float32: a second and a half at 100 Mbit/s."""
WAIT_SECONDS_MAX = 60.0
LOOK_SECONDS = 0.02
_pause = time.sleep


def main() -> None:
    folder, role, *join = sys.argv[1:]
    torch.set_num_threads(1)
    with node.sync(join=join, data_dir=folder, lan=False) as me:
        _wait(lambda: len(me.members()) > 0)
        if "PEERLOOM_ONE_PATH" not in os.environ:
            _wait(lambda: me.status()["counters"].get("paths_compared", 0) > 0)
        with Received() as received:
            me.average({"w": np.full(PARAMETERS, 1.0, np.float32)}, group="x")
        received.tell("averaging")
        model = torch.nn.Linear(2_000, PARAMETERS // 2_000 - 1, bias=False)
        plain = torch.optim.SGD(model.parameters(), 0.0)
        if role == "second":
            me.average({"begun": np.zeros(1, np.float32)}, group="begun")
            with Received() as received:
                me.optimizer(plain, run_id="model", local_steps=10_000)
            received.tell("state")
            return
        optimizer = me.optimizer(plain, run_id="model", local_steps=10_000)
        for _ in range(3):
            train(model, optimizer)
        me.average({"begun": np.zeros(1, np.float32)}, group="begun")
        until = time.monotonic() + WAIT_SECONDS_MAX
        while time.monotonic() < until and me.members():
            train(model, optimizer)
            _pause(LOOK_SECONDS)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(1, 2_000)).sum().backward()
    optimizer.step()


def _wait(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_SECONDS_MAX
    while not condition():
        assert time.monotonic() < until, "the condition did not hold in time"
        _pause(LOOK_SECONDS)


class Received:
    """Measures, in a thread, the bytes that arrive at all interfaces of this machine except loopback."""

    def __enter__(self) -> "Received":
        self._samples = [(time.monotonic(), _received_bytes())]
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._is_over.wait(LOOK_SECONDS):
            self._samples.append((time.monotonic(), _received_bytes()))

    def tell(self, what: str) -> None:
        """Print the rate between a tenth and nine tenths of the bytes, which excludes the messages before and
        after."""
        first, last = self._samples[0][1], self._samples[-1][1]
        inside = [each for each in self._samples if 0.1 <= (each[1] - first) / max(1, last - first) <= 0.9]
        (began, had), (ended, has) = inside[0], inside[-1]
        rate = (has - had) / max(LOOK_SECONDS, ended - began)
        line = {"what": what, "bytes": last - first, "bytes_per_second": round(rate)}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


def _received_bytes() -> int:
    return sum(
        int(Path(f"/sys/class/net/{name}/statistics/rx_bytes").read_text())
        for name in os.listdir("/sys/class/net")
        if name != "lo"
    )


if __name__ == "__main__":
    main()
