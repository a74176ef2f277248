"""Placement of stages on nodes behind routers: two nodes that only a relay connects get neighbouring stages
only if necessary."""

import json
import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from node.cli.client import ask
from partition.plan.observed import RELAYED_BYTES_PER_SECOND
from tests.lab.nat import Internet, internet, named
from tests.lab.network import FULL, python
from tests.lab.nodes import PORT, LabNode, swarm, wait_until
from tests.source import ROOT

RATE = "40mbit"
MEASURED_SECONDS_MAX = 240.0
PLAN_SECONDS_MAX = 120.0
HIDDEN = {"home", "symmetric"}


def plan(lab: Internet, node: LabNode, *words: str) -> dict[str, Any]:
    """Return the placement that `plan` prints for a model on this node."""
    program = [
        "ip",
        "netns",
        "exec",
        node.name,
        python(),
        "-m",
        "node",
        "plan",
        "simple-cnn",
        "--stages",
        "2",
    ]
    program += ["--replicas", "1", "--json", "--data-dir", str(node.data_dir), *words]
    done = subprocess.run(
        [*lab.enter, *program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PLAN_SECONDS_MAX,
        env=os.environ,
    )
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def measured(node: LabNode) -> dict[frozenset[str], float]:
    """Return the slower rate of each link by the names of its ends, as far as the node knows the links."""
    names = {row["peer"]: row["name"] for row in ask(node.data_dir, "peers")["peers"]}
    found: dict[frozenset[str], float] = {}
    for row in ask(node.data_dir, "measurements")["links"]:
        ends = frozenset(names.get(row[end], node.name) for end in ("sender", "receiver"))
        found[ends] = min(row["bytes_per_second"], found.get(ends, float("inf")))
    return found


def is_slowest(node: LabNode) -> bool:
    """Return whether the link of the hidden nodes is slower than one of them to the public node."""
    rates = measured(node)
    return rates[frozenset(HIDDEN)] < rates[frozenset(("home", "public"))]


def knows_all(node: LabNode) -> bool:
    """Return whether the node has heard of all links, including the measurements of the one between the
    hidden nodes."""
    rates = measured(node)
    is_calibrated = len(ask(node.data_dir, "measurements")["calibrations"]) == 4
    return is_calibrated and len(rates) == 6 and rates[frozenset(HIDDEN)] != RELAYED_BYTES_PER_SECOND


@pytest.mark.skipif(not FULL, reason="four calibrated nodes: PEERLOOM_LAB=full")
def test_nodes_joined_only_by_a_relay_are_neighbours_only_if_necessary(tmp_path: Path) -> None:
    sites = [named("public", name, rate=RATE) for name in ("asks", "public")]
    sites += [named(name, name, rate=RATE) for name in sorted(HIDDEN)]
    with internet(sites) as lab, swarm(lab, tmp_path) as nodes:
        nodes["asks"].start(CALIBRATE="true")
        nodes["asks"].ready()
        others = ["public", *sorted(HIDDEN)]
        nodes.start(others, "--join", f"{lab.public('asks')}:{PORT}", CALIBRATE="true")
        wait_until(
            partial(knows_all, nodes["asks"]), MEASURED_SECONDS_MAX, lambda: str(measured(nodes["asks"]))
        )
        paths = {row["name"]: row["path"] for row in ask(nodes["home"].data_dir, "peers")["peers"]}
        assert paths["symmetric"]["way"] == "relayed"
        # A link that was measured through a relay, before there was a direct path, is measured again.
        wait_until(
            partial(is_slowest, nodes["asks"]), MEASURED_SECONDS_MAX, lambda: str(measured(nodes["asks"]))
        )
        print(measured(nodes["asks"]))  # noqa: T201
        stages = plan(lab, nodes["asks"])["stages"]
        print(stages)  # noqa: T201
        placed = {name for stage in stages for name in stage["peers"]}
        assert placed != HIDDEN
