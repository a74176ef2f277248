"""The planner chooses the settings that RUN.toml leaves open and gives its reasons. All nodes choose the
same."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace as changed

from node.commands import Commands
from node.errors import UsageError
from node.planning.choices import choose, has_open
from node.planning.peers import Peers, PeerSpecification
from node.protocols.run_file import PlanTable, RunFile, TrainTable, check_run_file
from node.runs.manifest_builder import make_manifest
from partition.model.graph import Graph, encode_graph
from partition.model.layers import with_layers
from partition.plan.problem import Infeasible, Link
from partition.plan.rates import assumed
from tests.partition.test_layers import transformer
from tests.source import ROOT
from tests.stack import simple_cnn, simulate, swarm

GIB = 1 << 30
USUAL = Link()


@pytest.fixture(scope="module")
def graph() -> Graph:
    return with_layers(transformer(blocks=6))


def peers(count: int, *, memory: int = 8 * GIB, link: Link = USUAL) -> Peers:
    return Peers(
        tuple(PeerSpecification(f"p{number}", memory, assumed(60 * 10**9), link) for number in range(count))
    )


def asked(*, stages: int = 0, replicas: int = 0, batch: int = 64, **train: Any) -> RunFile:
    return RunFile(
        model="m", train=TrainTable(batch=batch, **train), plan=PlanTable(stages=stages, replicas=replicas)
    )


def test_only_settings_left_open_are_chosen(graph: Graph) -> None:
    wanted = asked(microbatch="auto", frames="int8", mode="exact", recompute=False)
    assert has_open(wanted)
    found, reasons = choose(wanted, graph, (), peers(2))
    assert isinstance(found.train.microbatch, int)
    assert 64 % found.train.microbatch == 0
    assert (found.train.frames, found.train.mode, found.train.recompute) == ("int8", "exact", False)
    assert any(reason.startswith(f"micro-batch {found.train.microbatch}:") for reason in reasons)
    assert not has_open(found)
    assert found == changed(wanted, train=found.train)


def test_frames_are_compressed_on_slow_links_but_exact_on_fast_ones(graph: Graph) -> None:
    for link, expected in ((Link(125_000_000, 100_000), "exact"), (Link(125_000, 100_000), "bfloat16")):
        wanted = asked(frames="auto", stages=2, replicas=1)
        found, reasons = choose(wanted, graph, (), peers(2, link=link))
        assert found.train.frames == expected
        assert any(f"frames {expected}" in reason for reason in reasons)


def test_local_steps_are_chosen_if_summing_gradients_costs_far_more(graph: Graph) -> None:
    slow = Link(2_500_000, 5_000_000)
    for link, expected in ((Link(12_500_000_000, 10_000), "exact"), (slow, "local")):
        found, reasons = choose(asked(mode="auto", local_steps=1_000), graph, (), peers(4, link=link))
        assert found.train.mode == expected
        assert any(expected in reason for reason in reasons)
    found, _ = choose(asked(mode="auto", local_steps=1_000, stages=2), graph, (), peers(4, link=slow))
    assert found.train.mode == "exact"


def test_recomputation_is_chosen_only_if_nothing_else_fits(graph: Graph) -> None:
    wanted = asked(recompute="auto", batch=16_384, microbatch=2_048, stages=2, replicas=1)
    assert choose(wanted, graph, (), peers(2))[0].train.recompute is False
    outcomes: list[bool | str | None] = []
    for memory in range(400 << 20, 800 << 20, 4 << 20):
        try:
            found, reasons = choose(wanted, graph, (), peers(2, memory=memory))
        except Infeasible:
            outcomes.append(None)
            continue
        outcomes.append(found.train.recompute)
        if found.train.recompute:
            assert any(reason.startswith("recomputing") for reason in reasons)
    # With more memory the planner never goes back to a costlier choice.
    assert list(dict.fromkeys(outcomes)) == [None, True, False]


def test_the_choice_does_not_depend_on_hash_seeds_or_peer_order(graph: Graph) -> None:
    wanted = asked(microbatch="auto", frames="auto", mode="auto", recompute="auto")
    unequal = tuple(
        replace(peer, calibration=assumed((number + 1) * 10**10), link=Link((number + 1) * 10**6, 10**6))
        for number, peer in enumerate(peers(5).peers)
    )
    here = choose(wanted, graph, (), Peers(unequal))
    assert choose(wanted, graph, (), Peers(unequal[::-1])) == here
    code = (
        "import sys\n"
        "from node.planning.choices import choose\n"
        "from node.planning.peers import Peers, PeerSpecification\n"
        "from node.protocols.run_file import PlanTable, RunFile, TrainTable\n"
        "from partition.model.graph import decode_graph\n"
        "from partition.plan.problem import Link\n"
        "from partition.plan.rates import assumed\n"
        "graph = decode_graph(sys.stdin.buffer.read())\n"
        "train = TrainTable(batch=64, microbatch='auto', frames='auto', mode='auto', recompute='auto')\n"
        "wanted = RunFile(model='m', train=train, plan=PlanTable(stages=0, replicas=0))\n"
        "peers = [PeerSpecification(f'p{n}', 8 << 30, assumed((n + 1) * 10**10), "
        "Link((n + 1) * 10**6, 10**6)) for n in range(5)]\n"
        "print(choose(wanted, graph, (), Peers(tuple(peers))))"
    )
    told = subprocess.run(
        [sys.executable, "-c", code],
        input=encode_graph(graph),
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)},
    ).stdout
    assert told.decode().strip() == str(here)


def test_a_manifest_requires_all_settings(graph: Graph) -> None:
    check_run_file(asked(microbatch="auto"), "RUN.toml")
    with pytest.raises(UsageError, match="has to be chosen"):
        make_manifest(asked(microbatch="auto"), graph, bytes(32), None, name="RUN.toml", created=0)  # type: ignore[arg-type]  # refused before data is looked at


def test_a_run_uses_the_chosen_settings_and_explains_them(tmp_path: Path) -> None:
    model = simple_cnn("float32")
    file = tmp_path / "model.peerloom"
    file.write_bytes(model.data)
    text = (
        "model = 'model.peerloom'\n[train]\nsteps = 1\nbatch = 16\n"
        "microbatch = 'auto'\nframes = 'auto'\nrecompute = 'auto'\nmode = 'auto'\n"
    )
    events: list[Any] = []

    async def scenario() -> None:
        async with swarm("ab", preset="lan") as group:
            node = group.nodes["a"]
            arguments = {
                "text": text,
                "name": "RUN.toml",
                "path": str(tmp_path / "RUN.toml"),
                "graph": str(file),
            }

            async def emit(event: object) -> None:
                events.append(event)

            await Commands(node).handlers["train"](arguments, emit)

    simulate(scenario)
    reasons = [event["reason"] for event in events if "reason" in event]
    assert any(reason.startswith("chosen: micro-batch ") for reason in reasons), reasons
