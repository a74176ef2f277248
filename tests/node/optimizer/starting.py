"""Measures how long calls of `step` take if real processes start one run of the optimizer together."""

import multiprocessing
import os
import threading
import time
from dataclasses import dataclass
from hashlib import blake2b
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from crypto.contact import parse_address
from node import config
from node.library.sync import SyncNode, sync

WAIT_SECONDS_MAX = 2.0
TRAINING_SECONDS = 8.0
"""How long to measure after the last process has started. Each wait under test began within half of this
time."""
PAUSE_SECONDS = 0.05
"""How long a batch takes, mostly asleep: eight processes with real batches would need more than two cores."""
TARGET, BATCH = 256, 16
ANSWER_SECONDS = 120.0


@dataclass(frozen=True)
class Found:
    """The observations of one process. Seconds in which the process was runnable without a core do not count
    as waits, because other programs on the machine cause them.
    """

    made_seconds: float
    longest_seconds: float
    starved_seconds: float
    """Seconds without a core, already subtracted from the longest wait."""
    steps: int
    loaded: int
    digest: str
    """A digest of the parameters at the last step that all processes have made."""


def start_processes(folder: Path, staggers: list[float], *, seeds: str, width: int = 64) -> list[Found]:
    """Start a process for each of `staggers`. It makes its optimizer that many seconds after all processes
    know each other. `seeds` says whether the models start "equal" or each with its "own" values.
    """
    context = multiprocessing.get_context("forkserver")  # so that torch is imported only once
    context.set_forkserver_preload(["torch", "torch.optim", "node.library.sync", "node.optimizer.open"])
    pipes: list[Connection] = []
    processes: list[Any] = []
    try:
        for number, stagger in enumerate(staggers):
            ours, theirs = context.Pipe()
            seed = number if seeds == "own" else 0
            given = (theirs, folder, number, len(staggers), stagger, seed, width)
            processes.append(context.Process(target=_peer, args=given))
            processes[-1].start()
            pipes.append(ours)
        pipes[0].send("")
        address = _answer(pipes[0])
        for pipe in pipes[1:]:
            pipe.send(address)
        for pipe in pipes[1:]:
            _answer(pipe)
        for word in ("in", "go", "trained"):
            if word == "go":
                begin = time.time() + 0.2
                for pipe in pipes:
                    pipe.send(begin + max(staggers) + TRAINING_SECONDS)
            else:
                assert [_answer(pipe) for pipe in pipes] == [word] * len(pipes)
        for pipe in pipes:
            pipe.send("end")
        answers = [_answer(pipe) for pipe in pipes]
        histories = [history for history, _ in answers]
        found: list[tuple[float, float, float, int, int]] = [figures for _, figures in answers]
        last = max(set.intersection(*(set(history) for history in histories)), default=-1)
        for pipe in pipes:
            pipe.send("left")
        digests = [history.get(last, "none") for history in histories]
        return [Found(*figures, digest) for figures, digest in zip(found, digests, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _answer(pipe: Connection) -> Any:
    assert pipe.poll(ANSWER_SECONDS), "a process did not answer"
    return pipe.recv()


def _peer(
    pipe: Connection, folder: Path, number: int, count: int, stagger: float, seed: int, width: int
) -> None:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    first, last = torch.nn.Linear(32, width), torch.nn.Linear(width, 10)
    model = torch.nn.Sequential(first, torch.nn.ReLU(), last)
    plain = torch.optim.AdamW(model.parameters(), 1e-3)
    address = pipe.recv()
    settings = config.Config(
        name=f"n{number}",
        data_dir=folder / str(number),
        swarm=config.SwarmSettings(name="starts", preset="host"),
        listen=config.Listen(addresses=(config.read_listen("127.0.0.1:0"),)),
        join=config.JoinSettings(lan=False, seeds=(parse_address(address),) if address else ()),
        resources=config.Resources(calibrate=False),
    )
    with sync(settings) as me:
        pipe.send(me.addresses[0])
        me.wait_for_members(count - 1, ANSWER_SECONDS)
        pipe.send("in")
        until = pipe.recv()
        threading.Event().wait(stagger)
        pipe.send(_train(pipe, me, number, model, plain, until))
        pipe.recv()  # until the others have their figures too


def _train(pipe: Connection, me: SyncNode, number: int, model: Any, plain: Any, until: float) -> Any:
    """Train to the end of the measurement, and then until all processes have finished."""
    import torch

    begun = time.monotonic()
    optimizer = me.optimizer(plain, "starts", target_batch_size=TARGET, batch_size=BATCH)
    made = time.monotonic() - begun
    waits = [(0.0, 0.0)]
    history: dict[int, str] = {}
    generator = torch.Generator().manual_seed(100 + number)
    is_told = False
    while not pipe.poll():
        batch = torch.randn(BATCH, 32, generator=generator)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch), batch[:, :10].argmax(1)).backward()  # type: ignore[no-untyped-call]  # torch's
        threading.Event().wait(PAUSE_SECONDS)
        begun, starved = time.monotonic(), _starved_seconds()
        optimizer.step()
        seconds = time.monotonic() - begun
        later = _starved_seconds()
        lost = min(seconds, max(later[each] - starved.get(each, 0.0) for each in later))
        if time.time() < until:
            waits.append((seconds - lost, lost))
        history[optimizer.global_step] = _digest(model)
        if time.time() >= until and not is_told:
            is_told = True
            pipe.send("trained")
    pipe.recv()
    stats = optimizer.stats
    return history, (made, *max(waits), stats.global_step, stats.states_loaded)


def _starved_seconds() -> dict[str, float]:
    """Return for how long each thread of this process was runnable without a core."""
    found = {}
    for thread in os.listdir("/proc/self/task"):
        try:
            text = Path(f"/proc/self/task/{thread}/schedstat").read_text()
        except OSError:  # the thread has just ended
            continue
        found[thread] = int(text.split()[1]) / 1e9
    return found


def _digest(model: Any) -> str:
    digest = blake2b(digest_size=8)
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()
