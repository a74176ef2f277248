"""Times the cost of a model's HTTP interface compared with the library in the same node: tokens per second of
32 streams, and the first token of one stream. Also times the cost of a JSON schema with a vocabulary of
32,768 tokens.

    python benchmarks/api.py [--quick] [--json]

One node on loopback serves a small model, whose stage runs in a separate process. The library's streams are
tasks in the node's process. The HTTP streams are connections of a separate process, which only reads events
as they come. Both send the same prompts in turns; the medians of several rounds count.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import trio
from _api_client import NAME, figures, prompt_of
from _figures import Goal, arguments, leave, report

from node.config import resolve
from node.content.token_bytes import byte_letters
from node.runtime import Node
from node.serving.asking import Asking, ServeWish
from node.serving.questions import Question
from node.web.page import Page
from partition.capture.models.model_spec import capture_built_in

STREAMS, CONTEXT = 32, 256
HELD_STREAMS, VOCABULARY = 8, 32_768
RATE_SHARE, FIRST_SECONDS = 0.97, 0.005


async def ask_library(asking: Asking, streams: int, tokens: int) -> dict[str, float]:
    """Return the figures of a round through the library."""
    marks: list[list[float]] = [[] for _ in range(streams)]

    async def one(number: int) -> None:
        marks[number].append(time.perf_counter())
        question = Question(prompt_of(number), tokens_max=tokens, temperature=0.0)
        async with asking.answering(NAME, question) as answer:
            async for _ in answer:
                marks[number].append(time.perf_counter())

    async with trio.open_nursery() as nursery:
        for number in range(streams):
            nursery.start_soon(one, number)
    return figures(marks, streams * tokens)


@asynccontextmanager
async def serving(
    folder: Path, vocabulary: int, wish: ServeWish
) -> AsyncIterator[tuple[Asking, trio.Process]]:
    """Yield a node that serves a small model, and a client of its HTTP interface."""
    model = folder / f"{NAME}.peerloom"
    options = {"layers": 6, "heads": 4, "width": 256}
    model.write_bytes(capture_built_in("gpt", (CONTEXT,), vocabulary, options=options).data)
    environment = {
        "PEERLOOM_LISTEN": "127.0.0.1:0",
        "PEERLOOM_DATA_DIR": str(folder / "node"),
        "PEERLOOM_WEB": "127.0.0.1:0",
        "PEERLOOM_CALIBRATE": "false",
    }
    environment |= {"PEERLOOM_LAN": "false", "PEERLOOM_CORES": "1", "PEERLOOM_ALLOW_UNFENCED": "true"}
    settings = resolve({}, environment)
    async with Node(settings) as node, trio.open_nursery() as nursery:
        page = Page(node)
        await nursery.start(page.run)
        asking = Asking(node.serving)
        await asking.serve(str(model), wish)
        made: Any = await page.models.keys.handlers["keys.new"]({"in_flight": 64}, _ignore)
        assert node.state.page is not None
        port = node.state.page.address.rpartition(":")[2]
        client = Path(__file__).with_name("_api_client.py")
        command = [sys.executable, str(client), port, made["key"]]
        process = await trio.lowlevel.open_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        yield asking, process
        process.terminate()
        await process.wait()
        nursery.cancel_scope.cancel()


async def ask_client(process: trio.Process, streams: int, tokens: int, *, held: str = "") -> dict[str, float]:
    """Return the figures of a round over HTTP."""
    assert process.stdin is not None
    assert process.stdout is not None
    await process.stdin.send_all(f"{streams} {tokens} {held}\n".encode())
    line = b""
    while not line.endswith(b"\n"):
        line += await process.stdout.receive_some()
    found: dict[str, float] = json.loads(line)
    return found


async def measure(folders: tuple[Path, Path], *, quick: bool) -> dict[str, float]:
    async with serving(folders[0], 256, ServeWish(name=NAME)) as (asking, process):
        found = await _rounds(asking, process, quick=quick)
    text = folders[1] / "tokenizer.json"
    text.write_text(json.dumps(pairs_of_letters(VOCABULARY)))
    wish = ServeWish(name=NAME, text=str(text))
    async with serving(folders[1], VOCABULARY, wish) as (_, process):
        return found | await _held_rounds(process, quick=quick)


def pairs_of_letters(count: int) -> dict[str, Any]:
    """Return a tokenizer of letters, and of as many pairs of letters as `count` tokens need."""
    letters = sorted(byte_letters())
    pairs = [(first, second) for first in letters for second in letters][: count - len(letters)]
    words = {word: number for number, word in enumerate([*letters, *map("".join, pairs)])}
    kind = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": kind,
        "decoder": kind,
        "model": {"type": "BPE", "vocab": words, "merges": [" ".join(pair) for pair in pairs]},
    }


async def _held_rounds(process: trio.Process, *, quick: bool) -> dict[str, float]:
    """Return the tokens per second of answers with and without a schema."""
    rates: dict[str, list[float]] = {"": [], "held": []}
    for number in range(1 + (4 if quick else 12)):
        for held, row in rates.items():
            found = await ask_client(process, HELD_STREAMS, 32 if quick else 96, held=held)
            row += [found["rate"]] if number else []  # the first round warms up
    free, kept = (statistics.median(row) for row in rates.values())
    return {"free_tokens_per_second": free, "held_tokens_per_second": kept, "held_share": kept / free}


async def _rounds(asking: Asking, process: trio.Process, *, quick: bool) -> dict[str, float]:
    rates: dict[str, list[float]] = {"library": [], "http": []}
    firsts: dict[str, list[float]] = {"library": [], "http": []}
    ways: dict[str, Callable[[int, int], Awaitable[dict[str, float]]]] = {
        "library": partial(ask_library, asking),
        "http": partial(ask_client, process),
    }
    tokens, rounds, singles = (48, 5, 20) if quick else (128, 12, 100)
    for way in ways.values():
        await way(STREAMS, 8)  # warm up
    for _ in range(rounds):
        for name, way in ways.items():
            rates[name].append((await way(STREAMS, tokens))["rate"])
    for _ in range(singles):
        for name, way in ways.items():
            firsts[name].append((await way(1, 2))["first"])
    rate = {name: statistics.median(row) for name, row in rates.items()}
    first = {name: statistics.median(row) for name, row in firsts.items()}
    return {
        "library_tokens_per_second": rate["library"],
        "http_tokens_per_second": rate["http"],
        "share": rate["http"] / rate["library"],
        "library_first_ms": first["library"] * 1e3,
        "http_first_ms": first["http"] * 1e3,
        "first_more_ms": (first["http"] - first["library"]) * 1e3,
    }


async def _ignore(_event: object) -> None:
    return


def main() -> int:
    options = arguments("Time the HTTP interface of models against the library.")
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        found = trio.run(partial(measure, (Path(first), Path(second)), quick=options.quick))
    goals = [
        Goal(
            "32 streams over HTTP, tokens per second relative to the library",
            found["share"],
            ">=",
            RATE_SHARE,
        ),
        Goal("first token over HTTP, additional seconds", found["first_more_ms"] / 1e3, "<=", FIRST_SECONDS),
    ]
    row = {name: round(value, 3) for name, value in found.items()}
    return report("api", [row], goals, as_json=options.json)


if __name__ == "__main__":
    leave(main())
