"""The cost of `me.optimizer` in a training loop: alone in its run, and while it averages with a peer.

The model is a perceptron of 10 million parameters. Alone, the wrapped optimizer and the plain one alternate
single steps in one process, in a changing order, with two plain steps for each wrapped one. Each wrapped step
is compared with the two plain steps next to it; the figure is the median of these ratios, because single
steps differ by a third on a shared machine. The ratio of the two plain steps shows how far the figure can be
trusted. The node runs in a thread of the same process, as in any script. With a peer (a second process; each
has one core), parameters are averaged at intervals of local steps. Blocking is the time of `step` beyond the
wrapped optimizer's own step, as a share of the time of all steps.
"""

import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from _figures import Goal, arguments, leave, report

from crypto.contact import parse_address
from node import config
from node.library.sync import SyncNode, sync

WIDTH = 2_200
BATCH = 32
TURNS, TURNS_QUICK = 150, 70
LOCAL_STEPS, ROUNDS, ROUNDS_QUICK = 50, 4, 1
ALONE_GOAL, BLOCKING_GOAL = 2.0, 5.0
ANSWER_SECONDS = 240.0


def settings(folder: str, name: str, seed: str) -> config.Config:
    return config.Config(
        name=name,
        data_dir=Path(folder) / name,
        swarm=config.SwarmSettings(name="benchmark", preset="local"),
        listen=config.Listen(addresses=(config.read_listen("127.0.0.1:0"),)),
        join=config.JoinSettings(lan=False, seeds=(parse_address(seed),) if seed else ()),
        resources=config.Resources(calibrate=False),  # calibration would disturb the measurement
    )


class Script:
    """A plain training loop."""

    def __init__(self, seed: int) -> None:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(64, WIDTH),
            torch.nn.ReLU(),
            torch.nn.Linear(WIDTH, WIDTH),
            torch.nn.ReLU(),
            torch.nn.Linear(WIDTH, WIDTH),
            torch.nn.ReLU(),
            torch.nn.Linear(WIDTH, 10),
        )
        self.parameters = sum(each.numel() for each in self.model.parameters())
        self.plain: Any = torch.optim.AdamW(self.model.parameters(), 1e-4)

    def steps(self, optimizer: Any, count: int) -> float:
        """Make this many steps; return their seconds."""
        import torch

        begun = time.perf_counter()
        for _ in range(count):
            loss = self.model(torch.randn(BATCH, 64)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return time.perf_counter() - begun


def alone(turns: int) -> dict[str, Any]:
    """Compare the wrapped optimizer with the plain one, in turns."""
    with tempfile.TemporaryDirectory() as folder, sync(settings(folder, "alone", "")) as me:
        script = Script(0)
        wrapped = me.optimizer(script.plain, run_id="overhead", local_steps=LOCAL_STEPS)
        script.steps(wrapped, 2)
        arms = {"wrapped": wrapped, "plain": script.plain, "again": script.plain}
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for turn in range(turns):
            for place in range(len(arms)):
                name = list(arms)[(turn + place) % len(arms)]
                seconds[name].append(script.steps(arms[name], 1))
        pairs = list(zip(seconds["plain"], seconds["again"], strict=True))
        ratios = [2 * own / sum(pair) for own, pair in zip(seconds["wrapped"], pairs, strict=True)]
        inside = wrapped.stats.blocked_seconds / wrapped.stats.global_step
    return {
        "case": "alone",
        "parameters": script.parameters,
        "step_ms": round(1e3 * statistics.median(seconds["plain"]), 2),
        "overhead_percent": round(100 * (statistics.median(ratios) - 1), 2),
        "plain_beside_itself_percent": round(100 * (statistics.median(b / a for a, b in pairs) - 1), 2),
        "inside_step_microseconds": round(1e6 * inside, 1),
    }


def peer(pipe: Connection, folder: str, name: str, rounds: int) -> None:
    """Run one of two processes that average."""
    with sync(settings(folder, name, pipe.recv())) as me:
        pipe.send(me.addresses[0])
        me.wait_for_members(1, 60)
        pipe.send(_averaged(me, rounds, ord(name[-1])))
        pipe.recv()  # wait until the other process has its figures too


def _averaged(me: SyncNode, rounds: int, seed: int) -> dict[str, Any]:
    script = Script(seed)
    wrapped = me.optimizer(script.plain, run_id="blocking", local_steps=LOCAL_STEPS)
    until = time.monotonic() + ANSWER_SECONDS
    while not wrapped.stats.peers:
        assert time.monotonic() < until, wrapped.status
        time.sleep(0.05)
    before = wrapped.stats
    seconds = 0.0
    while (wrapped.stats.rounds - before.rounds) < rounds:
        assert time.monotonic() < until, wrapped.status
        seconds += script.steps(wrapped, 1)
    stats = wrapped.stats
    return {
        "case": "averaging with a peer",
        "parameters": script.parameters,
        "rounds": stats.rounds - before.rounds,
        "steps": stats.global_step - before.global_step,
        "step_ms": round(1e3 * seconds / (stats.global_step - before.global_step), 2),
        "blocking_percent": round(100 * (stats.blocked_seconds - before.blocked_seconds) / seconds, 2),
    }


def together(rounds: int) -> list[dict[str, Any]]:
    """Run two processes that average; return their reports."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        pipes, processes, seed = [], [], ""
        try:
            for name in ("p0", "p1"):
                ours, theirs = context.Pipe()
                process = context.Process(target=peer, args=(theirs, folder, name, rounds))
                process.start()
                pipes.append(ours)
                processes.append(process)
                ours.send(seed)
                seed = _answer(ours)
            found = [_answer(pipe) for pipe in pipes]
            for pipe in pipes:
                pipe.send("done")
            for process in processes:
                process.join(30)
        finally:
            for process in processes:
                process.kill()
                process.join()
    return found


def _answer(pipe: Connection) -> Any:
    assert pipe.poll(ANSWER_SECONDS), "a peer did not answer"
    return pipe.recv()


def main() -> int:
    flags = arguments("The cost of the optimizer of `node.sync`.")
    rows = [alone(TURNS_QUICK if flags.quick else TURNS)]
    rows += together(ROUNDS_QUICK if flags.quick else ROUNDS)
    blocking = max(row["blocking_percent"] for row in rows[1:])
    goals = [
        Goal("overhead alone, percent", rows[0]["overhead_percent"], "<=", ALONE_GOAL),
        Goal("blocking while averaging, percent of the step", blocking, "<=", BLOCKING_GOAL),
    ]
    return report("optimizer", rows, goals, as_json=flags.json)


if __name__ == "__main__":
    leave(main())
