"""Nodes behind real NATs become members that host stages, with the help of relays.

Real nodes run on machines of their own, and are started and asked as a person does it. The short form shows
that a node behind a home router is reached; the long one (PEERLOOM_LAB=full) trains through relays and kills
one.
"""

import subprocess
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy

from node.checkpoints.weights import weights_name
from node.cli.client import ask
from node.storage.folder import FolderStorage
from partition.capture.models.model_spec import capture_built_in
from tests.lab.nat import internet, named
from tests.lab.network import FULL, python
from tests.lab.nodes import PORT, LabNode, LabSwarm, swarm, wait_until
from tests.stack import assert_equal

FOUND_SECONDS_MAX = 90.0
STEPS = 500
KILLED_AT = 60
TOKENS = 200
BACK_SECONDS_MAX = 10.0
"""Seconds allowed from a router's reboot, or a relay's death, until further steps are made."""
RUN = """
model = "simple-cnn"
data = "digits"
[train]
steps = %d
batch = 16
microbatch = 8
seed = 7
[plan]
stages = %d
replicas = 1
checkpoint_every = 100
"""


def paths(node: LabNode) -> dict[str, Any]:
    """Return the path to each other member, by name."""
    return {row["name"]: row["path"] for row in ask(node.data_dir, "peers")["peers"]}


def reservations(node: LabNode) -> int:
    return len((node.status.get("reachability") or {"relays": ()})["relays"])


def begin(nodes: LabSwarm, public: str, *others: str, relays: int = 1, **settings: str) -> None:
    """Start a node with a public address, then the others through it; wait until they agree and have
    reservations at relays."""
    nodes.start([public], **settings)
    join(nodes, public, *others, **settings)
    hidden = [nodes[name] for name in others if nodes[name].machine.hosts[4].startswith("192.168.")]
    wait_for_places(hidden, relays)


def join(nodes: LabSwarm, public: str, *others: str, **settings: str) -> None:
    """Start these nodes through a running one; wait until all agree."""
    for name in others:
        nodes[name].start("--join", f"{nodes[public].machine.hosts[4]}:{PORT}", **settings)
    for name in others:
        nodes[name].ready()
    nodes.converge(FOUND_SECONDS_MAX)


def wait_for_places(hidden: list[LabNode], relays: int) -> None:
    """Wait until each node has reservations at this many relays."""
    wait_until(
        lambda: all(reservations(node) >= relays for node in hidden),
        FOUND_SECONDS_MAX,
        lambda: "no place at a relay:\n" + "".join(node.said for node in hidden),
    )


def test_two_nodes_behind_home_routers_speak_through_a_relay(tmp_path: Path) -> None:
    sites = [named("public", "p"), named("home", "h"), named("symmetric", "s")]
    with internet(sites) as lab, swarm(lab, tmp_path) as nodes:
        begin(nodes, "p", "h", "s")
        h, s = nodes["h"], nodes["s"]

        def are_relayed() -> bool:
            found = [paths(h).get("s"), paths(s).get("h")]
            return all(path is not None and path["way"] == "relayed" for path in found)

        wait_until(are_relayed, FOUND_SECONDS_MAX, lambda: f"{paths(h)} {paths(s)}")
        assert paths(h)["s"]["relay"] == nodes["p"].status["peer"]
        assert all(node.status["offer"] is None or node.status["offer"]["may_serve"] for node in (h, s))


def step(node: LabNode) -> int:
    runs = node.status["runs"]
    return int(runs[-1].get("step") or 0) if runs else 0


def trained(node: LabNode, file: Path, stages: int, steps: int = STEPS) -> "subprocess.Popen[bytes]":
    """Start a run as a person does, on this node's machine."""
    file.write_text(RUN % (steps, stages))
    command = [python(), "-m", "node", "train", str(file), "--data-dir", str(node.data_dir)]
    return node.machine.start(command, output=file.with_suffix(".log"))


def result(node: LabNode) -> dict[str, Any]:
    """Return the weights that a node keeps of its only run."""
    data = FolderStorage(node.data_dir).read(weights_name(node.status["runs"][-1]["run"]))
    assert data is not None, node.said
    found: dict[str, Any] = safetensors.numpy.load(data)
    return found


@pytest.mark.skipif(not FULL, reason="four minutes: PEERLOOM_LAB=full")
def test_a_run_through_relays_is_exact_and_survives_lost_routers_and_relays(tmp_path: Path) -> None:
    public = [named("public", name) for name in ("p", "q", "alone")]
    sites = [*public, named("home", "h"), named("home", "i"), named("symmetric", "s")]
    with internet(sites) as lab, swarm(lab, tmp_path) as nodes:
        nodes["q"].start("--join", f"{lab.public('p')}:{PORT}", OBSERVER="true")
        begin(nodes, "p", "h", "i", "s", relays=2)
        h, q = nodes["h"], nodes["q"]
        training = trained(h, tmp_path / "RUN.toml", 4)
        said = (tmp_path / "RUN.log").read_text
        wait_until(lambda: step(h) >= KILLED_AT, FOUND_SECONDS_MAX, said)
        assert sum(node.status["counters"].get("circuits_carried", 0) for node in (nodes["p"], q)) > 0
        cuts: dict[str, Callable[[], None]] = {
            "home router rebooted": partial(lab.reboot, "h"),
            "symmetric router rebooted": partial(lab.reboot, "s"),
            "home router rebooted that drops what it does not know": partial(lab.reboot, "i", is_strict=True),
            "relay killed": q.kill,
        }
        for what, cut in cuts.items():
            cut()
            before = step(h)
            took = wait_until(lambda: step(h) >= before + 5, BACK_SECONDS_MAX, lambda: h.said)  # noqa: B023
            print(f"{what}: five steps {took:.1f} s later")  # noqa: T201
            wait_until(lambda: step(h) >= before + 60, FOUND_SECONDS_MAX, lambda: h.said)  # noqa: B023
        assert training.wait(FOUND_SECONDS_MAX) == 0, said()
        nodes.start(["alone"])
        assert trained(nodes["alone"], tmp_path / "ALONE.toml", 1).wait(FOUND_SECONDS_MAX) == 0
        want = result(nodes["alone"])
        for name in ("p", "h", "i", "s"):
            assert_equal(result(nodes[name]), want, "float32")


@pytest.mark.skipif(not FULL, reason="two minutes: PEERLOOM_LAB=full")
def test_a_run_leaves_the_relay_once_a_direct_path_exists(tmp_path: Path) -> None:
    """When a router forgets its mappings, the punched path is lost. The run goes on over the relay until a
    new path is punched."""
    sites = [named("public", "p"), named("public", "q"), named("home", "h"), named("home", "i")]
    with internet(sites) as lab, swarm(lab, tmp_path) as nodes:
        h, i, relays = nodes["h"], nodes["i"], (nodes["p"], nodes["q"])
        nodes.start(["p"], OBSERVER="true")
        join(nodes, "p", "q", OBSERVER="true")
        join(nodes, "p", "h", "i")
        wait_for_places([h, i], 2)

        def is_punched() -> bool:
            return [paths(h)["i"]["way"], paths(i)["h"]["way"]] == ["punched"] * 2

        wait_until(is_punched, FOUND_SECONDS_MAX, lambda: h.said)
        training = trained(h, tmp_path / "RUN.toml", 2, 100 * STEPS)
        said = (tmp_path / "RUN.log").read_text
        wait_until(lambda: step(h) >= KILLED_AT, FOUND_SECONDS_MAX, said)
        before = sum(map(relayed_bytes, relays))
        lab.reboot("h")
        wait_until(lambda: not is_punched(), FOUND_SECONDS_MAX, said)
        wait_until(is_punched, FOUND_SECONDS_MAX, said)
        at_punch = step(h)
        wait_until(lambda: step(h) >= at_punch + 20, FOUND_SECONDS_MAX, said)
        carried = sum(map(relayed_bytes, relays)) - before
        at_look = step(h)
        wait_until(lambda: step(h) >= at_look + 100, FOUND_SECONDS_MAX, said)
        more = sum(map(relayed_bytes, relays)) - before - carried
        print(f"the relay carried {carried} bytes, and {more} during 100 steps after the punch")  # noqa: T201
        assert more < carried / 10
        training.terminate()
        training.wait()


def relayed_bytes(relay: LabNode) -> int:
    return int(relay.status["counters"].get("relayed_bytes", 0))


def answer(door: LabNode, at: int = -1, disturb: Callable[[], object] = bool) -> tuple[list[int], float]:
    """Return the tokens of an answer, and the longest pause between two; `disturb` is called after `at` of
    them."""
    tokens: list[int] = []
    came: list[float] = []

    def on_event(event: dict[str, Any]) -> None:
        if "piece" in event:
            tokens.append(event["piece"])
            came.append(time.monotonic())
            if len(tokens) == at:
                disturb()

    question = {"prompt": list(b"There lived a king"), "tokens_max": TOKENS, "seed": 7, "temperature": 1.0}
    asked = {"service": "words", "question": question}
    ask(door.data_dir, "generate", asked, on_event, seconds=FOUND_SECONDS_MAX)
    return tokens, max((after - before for before, after in pairwise(came)), default=0.0)


@pytest.mark.skipif(not FULL, reason="two minutes: PEERLOOM_LAB=full")
def test_an_answer_survives_the_death_of_the_relay_that_carries_it(tmp_path: Path) -> None:
    sites = [named("public", name) for name in ("p", "q")]
    sites += [named("home", "h"), named("symmetric", "s"), named("home", "door")]
    with internet(sites) as lab, swarm(lab, tmp_path) as nodes:
        nodes.start(["p"], OBSERVER="true")
        join(nodes, "p", "q", "door", OBSERVER="true")
        join(nodes, "p", "h", "s")
        wait_for_places([nodes[name] for name in ("h", "s", "door")], 2)
        model = tmp_path / "words.peerloom"
        options = {"layers": 2, "heads": 2, "width": 32}
        model.write_bytes(capture_built_in("gpt", (2 * TOKENS,), 256, options=options).data)
        wish = {"name": "words", "stages": 2}
        ask(nodes["h"].data_dir, "serve", {"model": str(model), "wish": wish}, seconds=FOUND_SECONDS_MAX)
        door = nodes["door"]
        want, _ = answer(door)
        assert len(want) == TOKENS
        relay = paths(door)["s"]["relay"]
        (victim,) = [node for node in (nodes["p"], nodes["q"]) if node.status["peer"] == relay]
        got, pause = answer(door, TOKENS // 2, victim.kill)
        print(f"relay killed: the answer paused for {pause:.1f} s")  # noqa: T201
        assert got == want
        got, pause = answer(door, TOKENS // 2, partial(lab.reboot, "h"))
        print(f"home router of a stage rebooted: the answer paused for {pause:.1f} s")  # noqa: T201
        assert got == want
