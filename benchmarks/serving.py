"""Compares one peer's serving with plain transformers and its cache, batches with single sessions, two stages
with one, a shared prefix with a fresh one, and two stages over slow links with the links' delays.

    python benchmarks/serving.py [--quick] [--json]

The model is a llama with random weights in float32, and once more in bfloat16. Stages run in separate
processes with one thread each, as transformers does here. Decoding after a prompt is timed, and so is the
first token after a prompt of which 1,000 tokens have already been read. All take turns, and the best of
several rounds counts. For the slow links, three real nodes run on loopback (`_delayed_nodes`): two with one
stage each, and the door, the node that asks the service. Their own time per token is measured on the same
nodes without a delay.
"""

import sys
import time
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch
import transformers
import trio
from _delayed_nodes import DelayedNodes
from _figures import Goal, arguments, leave, report

from crypto.encoding import encode
from node.stages.host import StageHost
from partition.capture.models.model_spec import capture_built_in
from partition.capture.serving import capture_for_serving
from partition.capture.state_dict import bytes_of
from partition.codecs.codec import Payload, pack, unpack
from partition.model.cut import cut_layers
from partition.model.graph import Graph
from partition.stage import CopySession, EndSession, Reload, Serve, Served, StageSpecification, Unit
from partition.stage_layout import parameter_layout

ONE, EIGHT, THIRTY_TWO, TWO_STAGES = 0.85, 4.0, 6.0, 1.10
PREFIX, DELAYED = 0.3, 1.06
SHARED, OWN, CHUNK = 1_000, 16, 128
DELAYS = (0.02, 0.1)
"""One-way delays in seconds, for each of the three links that a token crosses."""
HOPS = 3
PROMPT = 256
VOCABULARY = 4_000


def make_model(*, quick: bool) -> Any:
    width = 256 if quick else 512
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=1024,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


class Service:
    """Stages in their processes, called one after another."""

    def __init__(self, hosts: list[StageHost]) -> None:
        self.hosts = hosts

    async def ask(self, units: list[Unit], tokens: list[int]) -> np.ndarray[Any, Any] | None:
        payload: Payload | None = pack([("int64", np.array(tokens))], "raw")
        for host in self.hosts:
            assert payload is not None
            reply = await host.call(Serve(tuple(units), payload))
            assert isinstance(reply, Served)
            payload = reply.output
        return None if payload is None else unpack(payload, bytes_max=payload.size_bytes)[0][1]

    async def seconds_a_token(self, sessions: int, tokens: int) -> float:
        """Return the seconds of one step of all sessions together, each after a prompt."""
        ids = np.random.default_rng(0).integers(3, VOCABULARY, (sessions, PROMPT))
        names = [number.to_bytes(16, "big") for number in range(sessions)]
        for name, row in zip(names, ids, strict=True):
            await self.ask([Unit(name, 0, PROMPT)], row.tolist())
        last = [7] * sessions
        begun = time.perf_counter()
        for step in range(tokens):
            found = await self.ask([Unit(name, PROMPT + step, 1, 1) for name in names], last)
            assert found is not None
            last = found.argmax(-1).tolist()
        spent = time.perf_counter() - begun
        for name in names:
            for host in self.hosts:
                await host.call(EndSession(name))
        return spent / tokens

    async def first_seconds(self, *, shares: bool) -> float:
        """Return the seconds to the first token of a prompt. With `shares`, all of its tokens except `OWN`
        have already been read; without, none has."""
        ids = np.random.default_rng(1).integers(3, VOCABULARY, SHARED + OWN).tolist()
        base, name = bytes(15) + b"b", bytes(15) + b"n"
        if shares:
            await self._read(base, ids[:SHARED], 0)
        begun = time.perf_counter()
        if shares:
            for host in self.hosts:
                await host.call(CopySession(name, base, SHARED))
        await self._read(name, ids, SHARED if shares else 0)
        spent = time.perf_counter() - begun
        for each in (base, name):
            for host in self.hosts:
                await host.call(EndSession(each))
        return spent

    async def _read(self, name: bytes, ids: list[int], begin: int) -> None:
        while begin < len(ids):
            part = ids[begin : begin + CHUNK]
            is_last = begin + len(part) == len(ids)
            await self.ask([Unit(name, begin, len(part), int(is_last))], part)
            begin += len(part)


async def open_service(graph: Graph, values: Any, stages: int) -> Service:
    layers = len(graph.layers)
    ends = [layers * (number + 1) // stages for number in range(stages)]
    hosts = []
    for share in cut_layers(graph, b"b" * 32, list(zip([0, *ends], ends, strict=False))):
        specification = StageSpecification(
            b"benchmark", share, (256, 32, 1024), cache_bytes=256 << 20, memory_bytes_max=4 << 30
        )
        host = await StageHost.open(encode(specification))
        arena = host.vector("parameters")
        for slot in parameter_layout(specification):
            arena[slot.begin_bytes : slot.end_bytes] = bytes_of(values[slot.name])
        del arena
        await host.call(Reload())
        hosts.append(host)
    return Service(hosts)


def plain_seconds(model: Any, tokens: int) -> float:
    """Return the seconds per token of transformers alone."""
    ids = torch.from_numpy(np.random.default_rng(0).integers(3, VOCABULARY, (1, PROMPT)))
    with torch.no_grad():
        past = model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values
        last = torch.tensor([[7]])
        begun = time.perf_counter()
        for _ in range(tokens):
            output = model(input_ids=last, past_key_values=past, use_cache=True)
            last = output.logits[:, -1].argmax(-1, keepdim=True)
        return (time.perf_counter() - begun) / tokens


async def measure(*, quick: bool) -> dict[str, float]:
    torch.set_num_threads(1)
    model = make_model(quick=quick)
    graph = capture_for_serving(model).graph
    values = model.state_dict()
    one, two = await open_service(graph, values, 1), await open_service(graph, values, 2)
    half_model = make_model(quick=quick).to(torch.bfloat16)
    half = await open_service(capture_for_serving(half_model).graph, half_model.state_dict(), 1)
    tokens, rounds = (16, 3) if quick else (64, 6)
    best: dict[str, float] = {}

    def note(name: str, seconds: float) -> None:
        best[name] = min(best.get(name, seconds), seconds)

    try:
        for _ in range(rounds):
            note("plain", plain_seconds(model, tokens))
            note("one", await one.seconds_a_token(1, tokens))
            note("two_stages", await two.seconds_a_token(1, tokens))
            note("eight", await one.seconds_a_token(8, max(4, tokens // 4)))
            note("plain_half", plain_seconds(half_model, tokens))
            note("one_half", await half.seconds_a_token(1, tokens))
            note("thirty_two", await one.seconds_a_token(32, max(4, tokens // 8)))
            note("fresh", await one.first_seconds(shares=False))
            note("shared", await one.first_seconds(shares=True))
    finally:
        for host in (*one.hosts, *two.hosts, *half.hosts):
            await host.aclose()
    return {
        "plain_ms": best["plain"] * 1e3,
        "one_ms": best["one"] * 1e3,
        "one": best["plain"] / best["one"],
        "half_ms": best["one_half"] * 1e3,
        "half": best["plain_half"] / best["one_half"],
        "eight": 8 * best["one"] / best["eight"],
        "thirty_two": 32 * best["one"] / best["thirty_two"],
        "two_stages": best["two_stages"] / best["one"],
        "first_token_ms": best["fresh"] * 1e3,
        "prefix": best["shared"] / best["fresh"],
    }


def measure_delays(*, quick: bool) -> dict[str, float]:
    """Return the time per token of two stages, relative to computation plus delays."""
    with TemporaryDirectory() as folder:
        nodes = DelayedNodes(Path(folder), "abc")
        try:
            return _measure_delays(nodes, Path(folder), rounds=1 if quick else 3)
        finally:
            nodes.close()


def _measure_delays(nodes: DelayedNodes, folder: Path, rounds: int) -> dict[str, float]:
    model = folder / "words.peerloom"
    options = {"layers": 4, "heads": 4, "width": 256}
    model.write_bytes(capture_built_in("gpt", (256,), 256, options=options).data)
    while any(len(nodes.ask(name, "peers")["peers"]) < 2 for name in "abc"):
        time.sleep(0.1)
    asked = {"model": str(model), "wish": {"name": "words", "stages": 2}}
    placed = nodes.ask("a", "serve", asked)["stages"]
    holders = {row["peer"] for rows in placed for row in rows}
    door = next(name for name in "abc" if nodes.peer(name) not in holders)
    best: dict[float, float] = {}
    for _ in range(rounds):
        for delay in (0.0, *DELAYS):
            nodes.proxies.delay_seconds = delay
            times = nodes.token_times(door, "words", range(1, 33), 12 if delay > 0.05 else 40)
            gaps = [after - before for before, after in pairwise(times[3:])]
            best[delay] = min(best.get(delay, inf), median(gaps))
    return {f"delay_{d * 1e3:.0f}": best[d] / (best[0.0] + HOPS * d) for d in DELAYS}


def main() -> int:
    options = arguments("Time serving against plain transformers.")
    transformers.utils.logging.set_verbosity_error()
    found = measure_delays(quick=options.quick) | trio.run(lambda: measure(quick=options.quick))
    row = {name: round(value, 2) for name, value in found.items()}
    goals = [
        Goal("one session, speed relative to transformers", found["one"], ">=", ONE),
        Goal("one session in bfloat16, speed relative to transformers", found["half"], ">=", ONE),
        Goal("8 sessions, throughput relative to one session", found["eight"], ">=", EIGHT),
        Goal("32 sessions, throughput relative to one session", found["thirty_two"], ">=", THIRTY_TWO),
        Goal("two stages, time per token relative to one stage", found["two_stages"], "<=", TWO_STAGES),
        Goal(
            "first token after a shared prefix, time relative to a fresh one", found["prefix"], "<=", PREFIX
        ),
        Goal(
            "token over 20 ms per hop, time relative to computation and delays",
            found["delay_20"],
            "<=",
            DELAYED,
        ),
        Goal(
            "token over 100 ms per hop, time relative to computation and delays",
            found["delay_100"],
            "<=",
            DELAYED,
        ),
    ]
    return report("serving", [row], goals, as_json=options.json)


if __name__ == "__main__":
    leave(main())
