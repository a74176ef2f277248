"""Serving with real processes: three nodes, two stages and a spare, one of them killed in mid-sentence."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from node.cli.client import ask, request
from node.demo.processes import SwarmProcesses
from partition.capture.models.model_spec import capture_built_in

NAMES = "abc"
TOKENS = 60
PROMPT = "Once upon a time"
SECONDS_MAX = 60.0
"""On a machine that is three times slower than ours, and busy."""


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SwarmProcesses]:
    """Three nodes that know each other, of which the first has published a gpt of two stages."""
    folder = tmp_path_factory.mktemp("serving")
    processes = SwarmProcesses(folder, "serving", time.sleep, calibrate=False)
    try:
        processes.launch(NAMES)
        options = {"layers": 2, "heads": 2, "width": 32}
        captured = capture_built_in("gpt", (96,), 256, options=options)
        (folder / "words.peerloom").write_bytes(captured.data)
        first = processes.start(NAMES[0], None)
        for name in NAMES[1:]:
            processes.start(name, first.address, ["--log", "json"])
        until(lambda: all(len(peers(processes, name)) == 2 for name in NAMES))
        wish = {"stages": 2}
        model = str(folder / "words.peerloom")
        ask(folder / "a", "serve", {"model": model, "wish": wish}, seconds=SECONDS_MAX)
        yield processes
    finally:
        processes.close()


def peers(swarm: SwarmProcesses, name: str) -> list[Any]:
    rows = ask(swarm.folder / name, "peers")["peers"]
    return list(rows)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS_MAX
    while not holds():
        assert time.monotonic() < end, "it did not come to that in time"
        Event().wait(0.1)


def question(**more: Any) -> dict[str, Any]:
    return {"prompt": list(PROMPT.encode()), "tokens_max": TOKENS, "seed": 7, **more}


def answer(
    folder: Path, *, at: int = -1, disturb: Callable[[], object] = bool, **more: Any
) -> tuple[list[int], dict[str, Any]]:
    """The tokens of an answer, and how it went; `disturb` is called after `at` of them."""
    tokens: list[int] = []

    def on_event(event: dict[str, Any]) -> None:
        if "piece" in event:
            tokens.append(event["piece"])
            if len(tokens) == at:
                disturb()

    asked = {"service": "words", "question": question(**more)}
    found = ask(folder, "generate", asked, on_event, seconds=SECONDS_MAX)
    return tokens, found


def holders(folder: Path) -> dict[str, int]:
    """The peers that answer, with their stages."""
    (service,) = ask(folder, "services", seconds=SECONDS_MAX)["services"]
    return {row["peer"]: stage for stage, rows in enumerate(service["stages"]) for row in rows}


def test_an_answer_survives_sigkill_of_a_stages_node(swarm: SwarmProcesses) -> None:
    door = swarm.folder / "a"
    undisturbed, went = answer(door, temperature=1.0)
    greedy, _ = answer(door)
    assert len(undisturbed) == len(greedy) == TOKENS
    assert went["moves"] == 0
    names = {node.peer: name for name, node in swarm.nodes.items()}
    other = next(name for peer in holders(door) if (name := names[peer]) != "a")
    # A client that hangs up frees its session in every stage.
    asked = {"service": "words", "question": question()}
    replies = request(door, "generate", asked, seconds=SECONDS_MAX)
    for _ in range(3):
        next(replies)
    replies.close()  # type: ignore[attr-defined]  # a generator
    until(lambda: all(not each["sessions"] for each in stage_rows(door)))
    # A text is read as one.
    pieces, _ = answer(door, prompt=PROMPT, stops=["\ufffd"])
    assert all(isinstance(piece, str) for piece in pieces)
    began = time.monotonic()
    tokens, went = answer(door, at=10, disturb=lambda: swarm.kill(other), temperature=1.0)
    assert tokens == undisturbed
    assert went["moves"] >= 1
    assert went["exact"]
    assert time.monotonic() - began < SECONDS_MAX
    assert answer(door)[0] == greedy
    # What was asked and answered stands in no file of any node.
    said = bytes(undisturbed)
    for path in swarm.folder.rglob("*"):
        if path.is_file() and path.suffix != ".peerloom":
            data = path.read_bytes()
            assert PROMPT.encode() not in data
            assert said[:12] not in data


def stage_rows(folder: Path) -> list[dict[str, Any]]:
    (service,) = ask(folder, "services", seconds=SECONDS_MAX)["services"]
    return [row for rows in service["stages"] for row in rows]
