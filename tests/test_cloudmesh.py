"""docs/cloudmesh.md: what it names is there, and a play of real nodes whose commands print what it shows.

The play takes minutes on a busy machine: `make soak` has it, and `PEERLOOM_DOCS=write`, which also writes the
page.
"""

import ast
import json
import os
import re
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

import numpy as np
import pytest

from node.content.datasets import load_digits
from tests.cloudmesh import NAMES, PAGE, ROWS, Play, page, shown_in, unknown
from tests.source import ROOT
from tests.stack import simple_cnn

pytest.importorskip("sklearn")

IS_WRITING = os.environ.get("PEERLOOM_DOCS") == "write"
SUBMISSIONS = 10
RUN = 'model = "model.peerloom"\n[train]\nsteps = {steps}\nbatch = 32\ndtype = "float64"\n[plan]\n{plan}\n'
ONE = "stages = 1\nreplicas = 1"


@pytest.mark.parametrize("name", sorted({test for row in ROWS for test in row.tests}))
def test_each_test_that_the_page_names_is_there(name: str) -> None:
    file, _, function = name.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    functions = ast.FunctionDef, ast.AsyncFunctionDef
    assert function in {node.name for node in ast.walk(tree) if isinstance(node, functions)}


@pytest.mark.skipif(IS_WRITING, reason="it is written below")
def test_the_page_is_of_these_rows_and_shows_something_of_each() -> None:
    text = PAGE.read_text()
    shown = shown_in(text)
    assert [key for key, lines in shown.items() if not any(lines)] == []
    assert text == page(shown)
    assert len(unknown()) == 12


# The play


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    folder = tmp_path_factory.mktemp("cloudmesh")
    (folder / "model.peerloom").write_bytes(simple_cnn().data)
    (folder / "single.peerloom").write_bytes(simple_cnn("float32").data)
    found = Play(folder)
    try:
        found.start()
        yield found
    finally:
        found.close()


@pytest.mark.skipif(not IS_WRITING and "PEERLOOM_PROCESSES" not in os.environ, reason="PEERLOOM_PROCESSES=1")
@pytest.mark.parametrize("part", ["looks", "peers", "data", "many", "steering", "federated", "leaving"])
def test_a_part_of_the_play_of_three_real_nodes(play: Play, part: str) -> None:
    """In this order; each may be played alone."""
    play.shown = {}
    PARTS[part](play)
    if IS_WRITING:
        before = shown_in(PAGE.read_text()) if PAGE.exists() else {}
        PAGE.write_text(page(before | play.shown))


def _first_looks(play: Play) -> None:
    """4.17, 4.18-4.21: location, rules, a device that is not there."""
    said = play.type("c", "config", "set", "location", "eu-west")
    play.show("place", said, "^location = eu-west; this machine serves others$")
    play.wait(lambda: "eu-west" in play.type("c", "status"))
    play.show("place", play.type("c", "status"), "eu-west")
    said = play.type("c", "config", "set", "device", "cuda:7")
    play.show("device", said, "^device = cuda:7")
    play.show("device", play.type("c", "status"), r"device cuda:7: .*the CPU computes")
    play.type("c", "config", "set", "device", "auto")
    said = play.type("c", "config", "set", "accept_runs", "nobody", code=2)
    play.show("rules", said, "error: accept_runs: nobody: want", "swarm|listed")
    said = play.type("c", "config", "set", "hours", "22:00-22:01")
    play.show("rules", said, "^hours = 22:00-22:01; this machine (serves|no)")
    play.type("c", "config", "set", "hours", "always")
    file = play.write("parts.toml", 'model = "simple-cnn"\ndata = "a.csv"\n[splits]\ntest = "none.csv"\n')
    play.write("a.csv", "one,two,label\n" + "0.5,0.25,1\n0.1,0.2,0\n" * 10)
    play.show("parts", play.type("a", "train", file, code=2), "none.csv: no such file")
    runs = play.ask("b", "runs", "list")["runs"]
    assert not any(run["status"] == "failed" for run in runs), "a failed request leaves no run"


def _fewer_peers_and_other_devices(play: Play) -> None:
    """The example of two stages by two replicas on three nodes."""
    text = (ROOT / "examples" / "digits.toml").read_text().replace("steps = 220", "steps = 12")
    said = play.type("a", "train", play.write("digits.toml", text), "--out", "model.safetensors")
    wanted = r"reduced to . x . for want of peers: 2 stages x 2 were asked for", r"^run \w+ done"
    play.show("count", said, *wanted)
    assert (play.folder / "model.safetensors").stat().st_size > 10_000
    file = play.write("run.toml", RUN.format(steps=4, plan=ONE))
    said = play.type("a", "train", file, "--devices", "cuda,mps,cpu")
    play.show("devices", said, r"too few peers with a slot on cuda: 1 stages are placed, 1 on cpu")
    said = play.type("a", "train", file, "--devices", "cuda", code=5)
    play.show("devices", said, r"of \d with a slot 0 are on cuda")
    runs = play.ask("b", "runs", "list")["runs"]
    assert {run["status"] for run in runs} == {"done"}, "what was not placed is on nobody's list"
    run = runs[0]
    play.show("watch", play.type("b", "runs", "list"), r"simple-cnn")
    play.show("watch", play.type("b", "runs", "show", run["run"]), "")
    csv = play.type("b", "runs", "metrics", run["run"], "--csv")
    play.show("watch", csv, "^step,", r"^1,")


def _data_and_what_comes_of_it(play: Play) -> None:
    """A table that does not do and one that does; validation, predictions, and receipts of the work."""
    rows = [f"{n % 3}.{n % 7},{(n * 5) % 11}.5,{'odd' if n % 3 == 1 else 'even'}\n" for n in range(200)]
    play.write("bad.csv", "".join(["width,height,label\n", *rows[:20], "wide,1.5,odd\n"]))
    play.write("table.csv", "".join(["width,height,label\n", *rows]))
    text = (
        "import torch\nfrom torch import nn\nfrom partition.capture import Task\n\n\n"
        "def net():\n"
        "    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))\n"
        "    loss = nn.CrossEntropyLoss(reduction='sum')\n"
        "    labels = (torch.zeros(2, dtype=torch.long),)\n"
        "    return Task(model, (torch.zeros(2, 2),), loss=loss, labels=labels)\n"
    )
    play.write("net.py", text)
    run = (
        'model = "net.py:net"\ndata = "{}"\n[splits]\nvalidation_share = 0.2\n'
        "[train]\nsteps = 200\nbatch = 32\nlearning_rate = 0.05\nvalidate_every = 2\npatience = 4\n"
        'keep = "best"\n[plan]\nstages = 1\nreplicas = 2\n'
    )
    file = play.write("bad.toml", run.format("bad.csv"))
    play.show("data", play.type("a", "train", file, code=2), r"bad\.csv: column 'width', sample 21")
    file = play.write("table.toml", run.format("table.csv"))
    said = play.type("a", "train", file)
    play.show("data", said, r"^run \w+ done")
    lines = [line for line in said.splitlines() if "validation loss" in line]
    play.show("validate", "\n".join(lines[-3:]), "validation loss")
    done = play.ask("a", "runs", "list")["runs"][-1]
    assert done["step"] < 200, "it ended early"
    assert (done["model"], done["status"]) == ("net", "done")
    play.show("validate", play.type("a", "runs", "show", done["run"]), r"^\w{16}", "validation")
    written = ("--out", "outputs.csv", "--picture", "confusion.svg")
    said = play.type("b", "predict", file, "--run", done["run"], *written)
    play.show(
        "predict", said, "samples", "accuracy", r"written to .*outputs\.csv", r"written to .*confusion\.svg"
    )
    assert (play.folder / "confusion.svg").read_text().startswith("<svg")
    play.wait(lambda: "no receipt yet" not in play.type("b", "receipts"))
    play.show("shares", play.type("b", "receipts"), "^RECEIPT", "measured|for others")


def _held(play: Play, name: str) -> tuple[int, list[str]]:
    """How many times a node leased its slot, and the runs whose steps it computed, in the order of these."""
    said = play.type(name, "events", "--kind", "StageLeased", "--kind", "StepCommitted", "--json")
    events = [json.loads(line) for line in said.splitlines()]
    leased = [event["run"] for event in events if event["kind"] == "StageLeased"]
    steps = [event["run"] for event in events if event["kind"] == "StepCommitted" and event["run"] in leased]
    return len(leased), [run for run, _ in groupby(steps)]


def _many_at_once(play: Play) -> None:
    """Ten runs at three nodes of one slot each, asked for at two of them at once."""
    files = [play.write(f"many-{n}.toml", RUN.format(steps=3 + n % 2, plan=ONE)) for n in range(SUBMISSIONS)]
    commands = [play.begin("ab"[n % 2], "train", file, "--wait", "5m") for n, file in enumerate(files)]
    said = [play.end(command) for command in commands]
    assert all(re.search(r"^run \w+ done", each, re.M) for each in said), "nobody waits for ever"
    waited = next((each for each in said if "waiting for peers" in each), "")
    play.show("race", waited, "waiting for peers: ", r"^run \w+ done")
    turns = 0
    for name in NAMES:
        leased, runs = _held(play, name)
        turns += leased
        assert len(set(runs)) == len(runs), f"two runs at once in the one slot of {name}"
    assert turns >= SUBMISSIONS
    for name in "ab":
        assert play.swarm.status(name)["runs"], "each is told"


def _steering(play: Play) -> None:
    """A long run: others may not stop it, its requester may; it is paused, resumed and revised."""
    file = play.write("long.toml", RUN.format(steps=5_000, plan=ONE))
    said = play.type("a", "train", file, "--detach")
    run = re.search(r"run (\w{16}) handed over", said)
    assert run, said
    name = run[1]

    def row(node: str) -> dict[str, Any]:
        return play.ask(node, "runs", "show", name)

    play.wait(lambda: row("a")["step"] > 3)
    play.show("steer", play.type("a", "runs", "pause", name), "")
    play.wait(lambda: row("a")["status"] == "paused")
    at = row("a")["step"]
    play.pause(1.0)
    assert row("a")["step"] == at, "it stands still"
    play.show("steer", play.type("a", "runs", "resume", name), "")
    play.wait(lambda: row("a")["step"] > at)
    said = play.type("a", "runs", "revise", name, "--learning-rate", "0.0005", "--priority", "7")
    play.show("steer", said, "")
    said = play.type("b", "runs", "stop", name, code=None)
    play.show("steer", said, "error:")
    play.show("steer", play.type("a", "runs", "stop", name), "")
    play.wait(lambda: row("a")["status"] == "stopped")


def _data_that_stays(play: Play) -> None:
    """Each node a third of the digits, which no other has."""
    file = play.write("federated.toml", 'model = "simple-cnn"\n[train]\nfederated = true\n')
    said = play.type("a", "train", file, code=2)
    play.show("federated", said, 'train.federated: data stays with its owners in train.mode = "local" alone')
    data = load_digits()
    marks = []
    for number, name in enumerate(NAMES):
        folder = play.folder / f"of-{name}" / "scans"
        folder.mkdir(parents=True)
        for part, arrays in (("train", data.train), ("test", data.test)):
            x, y = arrays["x"][number :: len(NAMES)].astype(np.float32), arrays["y"][number :: len(NAMES)]
            np.savez(folder / f"{part}.npz", x=x, y=y)
            marks += [image.tobytes()[64:192] for image in x[:50] if np.count_nonzero(image[0, 2:6]) > 12]
        if name != "a":
            said = play.type(name, "config", "set", "own_data", f"scans={folder}")
            play.show("federated", said, "^own_data = scans=")
    text = (
        'model = "single.peerloom"\ndata = "of-a/scans"\n[train]\nmode = "local"\nfederated = true\n'
        "steps = 500\nbatch = 16\nlocal_steps = 10\n"
    )
    said = play.type("a", "train", play.write("scans.toml", text))
    play.show("federated", said, r"^run \w+ done, accuracy")
    rounds = play.type("b", "events", "--kind", "AveragingEnded", "--json")
    assert any(len(json.loads(line)["averaged"]) > 1 for line in rounds.splitlines()), "they averaged"
    for name in NAMES:
        for path in play.swarm.nodes[name].data_dir.rglob("*"):
            if path.is_file():
                kept = path.read_bytes()
                assert not any(mark in kept for mark in marks), f"{path} holds samples"


def _a_requester_that_leaves(play: Play) -> None:
    plan = "stages = 1\nreplicas = 2\ntrainers = 2"
    said = play.type("c", "train", play.write("last.toml", RUN.format(steps=40, plan=plan)), "--detach")
    run = re.search(r"run (\w{16}) handed over", said)
    assert run, said
    play.show("result", said, "handed over")
    play.wait(lambda: play.ask("a", "runs", "show", run[1])["step"] > 1)
    play.swarm.leave("c")
    play.wait(lambda: play.ask("a", "runs", "show", run[1])["status"] == "done")
    said = play.type("b", "runs", "fetch", run[1], "--out", "later.safetensors")
    play.show("result", said, "")
    assert (play.folder / "later.safetensors").stat().st_size > 10_000


PARTS: dict[str, Callable[[Play], None]] = {
    "looks": _first_looks,
    "peers": _fewer_peers_and_other_devices,
    "data": _data_and_what_comes_of_it,
    "many": _many_at_once,
    "steering": _steering,
    "federated": _data_that_stays,
    "leaving": _a_requester_that_leaves,
}
