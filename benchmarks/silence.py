"""How much one silent and one slow member slow down a run of the optimizer of six others.

Eight nodes run on loopback, in threads of one process; a step consists of a sleep and a small model. Six
members train until they average regularly, and their rounds per second are counted. Then two more join: one
is four times slower, the other is silent. A silent member of kind `absent` is listed and joins no round; one
of kind `ready` enters every group and sends nothing. The rounds of the six are counted again from that moment
on, so the figure includes the time of detection. `local`: tensors are averaged after a number of local steps.
`batch`: rounds are the steps of a target batch.
"""

import statistics
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from _figures import Goal, arguments, leave, report

from crypto.contact import parse_address
from node import config
from node.library.sync import SyncNode, sync
from tests.hostile.silent import Silence, SilentParticipant

PUNCTUAL, SLOWNESS = 6, 4.0
STEP_SECONDS, LOCAL_STEPS, BATCH = 0.05, 10, 32
UNDISTURBED_SECONDS, SECONDS, SECONDS_QUICK = 4.0, 40.0, 14.0
JOINED_SECONDS = 30.0
RATE_GOAL = 0.8
OPTIONS: dict[str, dict[str, Any]] = {
    "local": {"local_steps": LOCAL_STEPS},
    "batch": {"target_batch_size": 8 * PUNCTUAL * BATCH},
}


def settings(folder: str, name: str, seed: str) -> config.Config:
    return config.Config(
        name=name,
        data_dir=Path(folder) / name,
        swarm=config.SwarmSettings(name="benchmark", preset="local"),
        listen=config.Listen(addresses=(config.read_listen("127.0.0.1:0"),)),
        join=config.JoinSettings(lan=False, seeds=(parse_address(seed),) if seed else ()),
        resources=config.Resources(calibrate=False),
    )


def adam() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10))
    return model, torch.optim.AdamW(model.parameters(), 1e-3)


class Trainer:
    """A training loop in a thread."""

    def __init__(self, me: SyncNode, run_id: str, seconds: float, options: dict[str, Any]) -> None:
        self._model, plain = adam()
        self._seconds = seconds
        self.optimizer = me.optimizer(plain, run_id, **options)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop)
        self._thread.start()

    def _loop(self) -> None:
        while not self._ended.wait(self._seconds):
            self.optimizer.zero_grad()
            self._model(torch.randn(BATCH, 64)).square().mean().backward()
            self.optimizer.step()

    def end(self) -> None:
        self._ended.set()

    def close(self) -> None:
        self.end()
        self._thread.join()
        self.optimizer.close()


def rate(members: list[Trainer], seconds: float) -> float:
    """Return the rounds per second of the median member."""
    before = [each.optimizer.stats.rounds for each in members]
    begun = time.monotonic()
    time.sleep(seconds)
    lasted = time.monotonic() - begun
    made = [each.optimizer.stats.rounds - n for each, n in zip(members, before, strict=True)]
    return float(statistics.median(made)) / lasted


def play(nodes: list[SyncNode], mode: str, silence: Silence, seconds: float) -> dict[str, Any]:
    options, run_id = OPTIONS[mode], f"{mode}-{silence}"
    with ExitStack() as stack:
        members = [Trainer(me, run_id, STEP_SECONDS, options) for me in nodes[:PUNCTUAL]]
        for each in members:
            stack.callback(each.close)
        end = time.monotonic() + JOINED_SECONDS
        while time.monotonic() < end and min(each.optimizer.stats.rounds for each in members) < 3:
            time.sleep(0.05)
        without = rate(members, UNDISTURBED_SECONDS)
        slow = Trainer(nodes[PUNCTUAL], run_id, SLOWNESS * STEP_SECONDS, options)
        silent = SilentParticipant(nodes[PUNCTUAL + 1], adam()[1], run_id, silence=silence, **options)
        stack.callback(slow.close)
        stack.callback(silent.close)
        during = rate(members, seconds)
        rounds_of_slow = slow.optimizer.stats.rounds
        for each in (*members, slow):
            each.end()
    return {
        "mode": mode,
        "silent": silence,
        "rounds_per_second_without": round(without, 2),
        "with": round(during, 2),
        "ratio": round(during / without, 3) if without else 0.0,
        "rounds_of_the_slow": rounds_of_slow,
    }


def main() -> int:
    flags = arguments(__doc__ or "")
    torch.set_num_threads(1)
    cases: list[tuple[str, Silence]] = [("local", "absent"), ("batch", "absent")]
    if not flags.quick:
        cases += [("local", "ready"), ("batch", "ready")]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        nodes: list[SyncNode] = []
        for number in range(PUNCTUAL + 2):
            seed = nodes[0].addresses[0] if nodes else ""
            nodes.append(stack.enter_context(sync(settings(folder, f"n{number}", seed))))
        for each in nodes:
            each.wait_for_members(len(nodes) - 1)
        rows = [play(nodes, *case, SECONDS_QUICK if flags.quick else SECONDS) for case in cases]
    goals = [
        Goal(
            f"rounds per second, with both relative to without, {row['mode']}, {row['silent']}",
            row["ratio"],
            ">=",
            RATE_GOAL,
        )
        for row in rows
    ]
    return report("silence", rows, goals, as_json=flags.json)


if __name__ == "__main__":
    leave(main())
