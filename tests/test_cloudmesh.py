"""A scripted session of real nodes (the play) prints the output that docs/cloudmesh.md shows.

Every test run includes a quick part, which starts nodes and refuses invalid input. The whole play takes
minutes on a busy machine: `make soak` runs it, and so does `PEERLOOM_DOCS=write`, which also writes the page.
"""

import importlib.util
import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import groupby
from typing import Any

import numpy as np
import pytest

from node.content.datasets import load_digits
from node.main import run
from tests.cloudmesh import IS_WRITING, NAMES, PAGE, Play, free_port, taken_port
from tests.cloudmesh_report import (
    page,
    shown_in,
)  # fmt: skip
from tests.source import ROOT
from tests.stack import simple_cnn

pytest.importorskip("sklearn")

IS_WHOLE = IS_WRITING or "PEERLOOM_PROCESSES" in os.environ
SUBMISSIONS = 6
SPARES = "de"
"""Nodes that join later as providers; one of them is killed and one leaves."""
RUN = 'model = "model.peerloom"\n[train]\nsteps = {steps}\nbatch = 32\n[plan]\n{plan}\n'
ONE = "stages = 1\nreplicas = 1"
STILL_SECONDS = 2.0
"""How long a process is frozen: it only looks slow then, as on a busy machine."""


# Without a swarm


@pytest.fixture
def alone(tmp_path: Any) -> Iterator[Play]:
    """A play without a swarm."""
    found = Play(tmp_path)
    try:
        yield found
    finally:
        found.close()


def test_invalid_ports_and_numbers_are_refused(
    alone: Play, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quick part of the play, with one node and commands that need none."""
    shown = _start_alone(alone)
    monkeypatch.chdir(alone.folder)
    _numbers(alone, capsys)
    if IS_WRITING:
        _keep(shown)


def _start_alone(play: Play) -> dict[str, list[str]]:
    with taken_port() as port:
        moved = play.node("--port", str(port), "--memory", "300MB", "--observer")
        said = moved.said
        play.show("4.2 alternative, 4.16 alternative", said, rf"\(port {port} was taken\)")
        play.show("4.15 exceptional", said, "too small: memory 0.30 GB")
        refused = play.node("--listen", f"127.0.0.1:{port}")
        assert refused.process.wait() == 2
        wanted = f"cannot listen on 127.0.0.1:{port}: the port is taken"
        play.show("4.2 exceptional, 4.16 exceptional", refused.said, wanted)
    refused = play.node("--port", "70000")
    assert refused.process.wait() == 2
    assert "--port 70000: want a whole number, 1 to 65535" in refused.said
    _frozen(play, moved.process.pid)
    moved.process.terminate()
    assert moved.process.wait() == 0
    return play.shown


def _frozen(play: Play, process: int) -> None:
    """Freeze a process for a while, as it would stall on a busy machine."""
    os.kill(process, signal.SIGSTOP)
    play.pause(STILL_SECONDS)
    os.kill(process, signal.SIGCONT)


NUMBERS = (
    ("4.6 exceptional", "batch = 1000000000", "train.batch = 1000000000: want a whole number, 1 to 1048576"),
    (
        "4.7 exceptional",
        "learning_rate = 100",
        "train.learning_rate = 100: want a finite number, more than 0",
    ),
    ("4.7 alternative", "learning_rate = -1", "train.learning_rate = -1: want a finite number, more than 0"),
    ("4.8 exceptional", "epochs = 1e9", "train.epochs = 1000000000.0: want a finite number, more than 0"),
    ("4.8 exceptional", "epochs = 0", "train.epochs = 0: want a finite number, more than 0"),
)


def _numbers(play: Play, capsys: pytest.CaptureFixture[str]) -> None:
    """Check that each wrong number is refused with a message that names it, without a running node."""
    for key, line, wanted in NUMBERS:
        file = play.write("absurd.toml", f'model = "simple-cnn"\n[train]\n{line}\n')
        play.typed = f"peerloom train {file}      # {line}"
        assert run(["train", file, "--data-dir", str(play.folder)]) == 2
        play.show(key, capsys.readouterr().err, re.escape(wanted))


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


def _keep(shown: dict[str, list[str]]) -> None:
    """Write the page, with a part's new output instead of the old."""
    before = shown_in(PAGE.read_text()) if PAGE.exists() else {}
    PAGE.write_text(page(before | shown))


@pytest.mark.skipif(not IS_WHOLE, reason="PEERLOOM_PROCESSES=1")
@pytest.mark.parametrize(
    "part",
    [
        "starting",
        "settings",
        "sources",
        "peers",
        "absurd",
        "data",
        "many",
        "lost",
        "steering",
        "federated",
        "leaving",
    ],
)
def test_a_part_of_the_play_of_real_nodes(play: Play, part: str) -> None:
    """Play the parts in this order; each may also be played alone."""
    play.shown = {}
    PARTS[part](play)
    if IS_WRITING:
        _keep(play.shown)


def _starting(play: Play) -> None:
    """Play 4.1, 4.2, 4.15, 4.16 (of the report): nodes start; some stall or are killed meanwhile."""
    port = str(free_port())
    refused = play.node("--port", "70000")
    assert refused.process.wait() == 2
    play.show("4.1 exceptional", refused.said, "--port 70000: want a whole number, 1 to 65535")
    first = play.node("--port", port, "--name", "one", until="compute")
    play.show("4.1 typical", first.said, rf"listening.*:{port}")
    play.show("4.18 alternative, 4.19 alternative", first.said, "compute")
    play.typed = "peerloom --port " + port
    second = play.node("--port", str(free_port()), "--join", f"127.0.0.1:{port}", until="joined")
    play.show("4.2 typical, 4.16 typical", second.said, "joined")
    lists = partial(play.at, first.data_dir, "status")
    play.wait(lambda: re.search(r"members +1 other alive", lists()) is not None)
    play.show("4.2 typical, 4.16 typical", lists(), r"members +1 other alive")
    for single in (first, second):
        single.process.terminate()
    for single in (first, second):
        assert single.process.wait() == 0
    slow = play.node("--port", str(free_port()), at_once=lambda each: _frozen(play, each))
    play.show("4.1 alternative", slow.said, "listening")
    slow.process.kill()
    slow.process.wait()
    before = play.at(slow.data_dir, "id").splitlines()[0]
    again = play.node("--port", str(free_port()), data_dir=slow.data_dir)
    play.typed += "      # after kill -9"
    play.show("4.1 exceptional", again.said, "listening")
    assert play.at(slow.data_dir, "id").splitlines()[0] == before
    again.process.terminate()
    assert again.process.wait() == 0
    given = play.node("--memory", "2GB", "--cores", "1", "--location", "eu-west")
    play.show("4.15 typical, 4.3 alternative", given.said, r"compute .*1 core, 2\.0 of .*in eu-west")
    given.process.terminate()


def _settings(play: Play) -> None:
    """Play 4.3 and 4.17 to 4.21: a provider's offer."""
    said = play.type("b", "config", "set", "location", "eu-west")
    play.show("4.17 alternative", said, "^location = eu-west; this machine serves others$")
    play.wait(lambda: "eu-west" in play.type("a", "peers"))
    play.show("4.3 typical", play.type("a", "peers"), "eu-west")
    play.show("4.18 typical", play.type("c", "config", "set", "memory", "2GB"), "^memory = 2GB")
    play.show("4.18 typical", play.type("c", "status"), r"compute .* 2\.0 of")
    said = play.type("c", "config", "set", "memory", "300MB")
    play.show("4.18 exceptional", said, "too small: memory 0.30 GB: a stage's process takes")
    play.type("c", "config", "set", "memory", "80%")
    play.show("4.19 typical", play.type("c", "config", "set", "cores", "1"), "^cores = 1")
    play.type("c", "config", "set", "memory", "8GB")
    said = play.type("c", "config", "set", "slots", "2")
    play.show("4.19 exceptional", said, "too small: cores 1 for each of 2 slots")
    play.type("c", "config", "set", "slots", "1")
    play.type("c", "config", "set", "cores", "4000")
    play.show("4.19 exceptional", play.type("c", "status"), "corrected: cores 4000: this machine has")
    play.type("c", "config", "set", "cores", "1")
    play.type("c", "config", "set", "memory", "80%")
    play.show("4.20 typical", play.type("c", "config", "set", "device", "auto"), "^device = auto")
    said = play.type("c", "config", "set", "device", "cuda:7")
    play.wait(lambda: "corrected" in play.type("c", "status"))
    play.show("4.20 exceptional", play.type("c", "status"), r"device cuda:7: .*the CPU computes")
    said = play.type("c", "config", "set", "accept_runs", "swarm")
    play.show("4.21 typical", said, "this machine serves others")


def _sources(play: Play) -> None:
    """Play 4.4: readable sources, missing ones, and sources of several kinds."""
    rows = "".join(f"{n % 3}.5,{n % 7}.25,{'odd' if n % 2 else 'even'}\n" for n in range(40))
    sets = play.folder / "sets"
    sets.mkdir(exist_ok=True)
    (sets / "train.csv").write_text("width,height,label\n" + rows)
    play.show("4.4 typical", play.here("data", "show", "sets/train.csv"), "train", "test")
    shutil.rmtree(play.folder / "half", ignore_errors=True)
    (play.folder / "half").mkdir()
    np.savez(play.folder / "half" / "test.npz", x=np.zeros((4, 1, 8, 8), np.float32), y=np.arange(4))
    file = play.write("half.toml", 'model = "simple-cnn"\ndata = "half"\n')
    play.show("4.4 exceptional", play.type("a", "train", file, code=2), "^error: .*half")
    file = play.write(
        "parts.toml", 'model = "simple-cnn"\ndata = "sets/train.csv"\n[splits]\ntest = "none.csv"\n'
    )
    play.show("4.4 exceptional", play.type("a", "train", file, code=2), "none.csv: no such file")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(sets)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/train.csv"
        play.show("4.4 alternative", play.here("data", "show", url), r"^parts .* train, ")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    said = play.here("data", "show", "ftp://host/train.csv", code=2)
    play.show("4.4 alternative", said, "ftp:// is not read; what is: http://, https://, s3://, gs://")
    if importlib.util.find_spec("s3fs") is not None:
        return  # a different test reads a bucket
    said = play.here("data", "show", "s3://sets/train.csv", code=2)
    play.show("4.4 alternative", said, "the package s3fs, which reads s3://, is not installed", "install")


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - its caller's word
        pass


CONFIGURED = (
    'model = "simple-cnn"\ndata = "digits"\n[train]\nepochs = 0.1\nbatch = 16\nlearning_rate = 0.01\n'
    "[plan]\nstages = 2\nreplicas = 1\n"
)


def _peers(play: Play) -> None:
    """Play 4.5 to 4.11, 4.13, 4.14, 4.20: runs on the available peers."""
    said = play.type("a", "train", play.write("run.toml", CONFIGURED), "--devices", "common")
    play.typed += "      # epochs = 0.1, batch = 16, learning_rate = 0.01, 2 stages x 1"
    done = r"^run \w+ done"
    for key in ("4.5", "4.6", "4.7", "4.8", "4.9"):
        play.show(f"{key} typical", said, "accepted", done)
    play.show("4.10 alternative", said, r"devices near by: \d on cpu", done)
    play.show("4.11 typical, 4.13 typical", said, "placing|stage|layers", done)
    play.show("4.20 alternative", said, done)  # c declares cuda:7, which it does not have
    run = play.ask("a", "runs", "list")["runs"][-1]["run"]
    said = play.type("a", "runs", "fetch", run, "--out", "weights.safetensors")
    play.show("4.14 typical", said, "")
    assert (play.folder / "weights.safetensors").stat().st_size > 10_000
    play.wait(lambda: all(not _slots_taken(play, name) for name in NAMES))
    _watched(play, run)
    said = play.type("a", "train", play.write("none.toml", "[train]\nsteps = 3\n"))
    keys = "4.5 alternative, 4.6 alternative, 4.9 alternative"
    play.show(keys, said, r"model: vision \(none is given\): simple-cnn, batch 128", done)
    text = (ROOT / "examples" / "digits.toml").read_text().replace("steps = 220", "steps = 4")
    said = play.type("a", "train", play.write("digits.toml", text))
    play.show(
        "4.11 alternative", said, r"reduced to . x . for want of peers: 2 stages x 2 were asked for", done
    )
    file = play.write("one.toml", RUN.format(steps=4, plan=ONE))
    play.show("4.10 typical", play.type("a", "train", file, "--devices", "cpu"), done)
    said = play.type("a", "train", file, "--devices", "cuda", code=5)
    play.show("4.10 exceptional", said, r"^error: .*of \d with a slot 0 are on cuda")
    said = play.type("a", "train", file, "--devices", "tpu", code=2)
    play.show("4.10 exceptional", said, "--devices tpu: want some of cuda, mps, cpu")
    file = play.write("nine.toml", 'model = "simple-cnn"\n[plan]\nreplicas_min = 9\n')
    said = play.type("a", "train", file, code=5)
    play.show("4.11 exceptional", said, r"^error: .*9 peers are needed \(1 stage x 9\), \d offer")
    file = play.write("place.toml", RUN.format(steps=4, plan=f'{ONE}\nplace = "eu-west"'))
    play.show("4.17 typical", play.type("a", "train", file), done)


def _slots_taken(play: Play, name: str) -> bool:
    """Return whether a node holds a stage."""
    return any(run["status"] == "running" for run in play.swarm.status(name)["runs"])


def _watched(play: Play, run: str) -> None:
    key = "Watching training typical"
    play.show(key, play.type("b", "runs", "list"), r"simple-cnn")
    play.show(key, play.type("b", "runs", "show", run), r"^\w{16}", "stage 1", "result")
    csv = play.type("b", "runs", "metrics", run, "--csv")
    play.show(key, csv, "^step,", r"^1,")


def _absurd(play: Play) -> None:
    """Play 4.5, 4.9: a model that no provider could hold never reaches one."""
    play.write("words.txt", "the quick brown fox jumps over the lazy dog\n" * 200)
    text = (
        'model = "gpt"\ndata = "words.txt"\noptions = {layers = 8, heads = 32, width = 32768}\n'
        "[train]\nsteps = 2\nbatch = 1\nmicrobatch = 1\n"
    )
    said = play.type("a", "train", play.write("absurd.toml", text), code=5)
    wanted = r"^error: .*one layer alone needs \d+\.\d+ GB to train, the largest of \d peers offers"
    play.show("4.5 exceptional, 4.9 exceptional", said, wanted)
    said = play.type("a", "train", play.write("nobody.toml", 'model = "simple-cmm"\n'), code=2)
    play.show("4.9 exceptional", said, "no model is called 'simple-cmm'; did you mean")
    assert all(play.swarm.status(name)["members_alive"] >= len(NAMES) - 1 for name in NAMES)


VALIDATION = "Validation and the best state typical"
PREDICTIONS = "Predictions on new samples typical"
SHARES = "Shares by what each has given typical"


def _data_and_what_comes_of_it(play: Play) -> None:
    """Play an unsuitable table and a suitable one; validation, predictions, and receipts of the work."""
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
    said = play.type("a", "train", file, code=2)
    assert "bad.csv: column 'width', sample 21" in said
    file = play.write("table.toml", run.format("table.csv"))
    said = play.type("a", "train", file)
    lines = [line for line in said.splitlines() if "validation loss" in line]
    play.show(VALIDATION, "\n".join(lines[-3:]), "validation loss")
    done = play.ask("a", "runs", "list")["runs"][-1]
    assert done["step"] < 200, "the run did not end early"
    assert (done["model"], done["status"]) == ("net", "done")
    play.show(VALIDATION, play.type("a", "runs", "show", done["run"]), r"^\w{16}", "validation")
    written = ("--out", "outputs.csv", "--picture", "confusion.svg")
    said = play.type("b", "predict", file, "--run", done["run"], *written)
    play.show(
        PREDICTIONS, said, "samples", "accuracy", r"written to .*outputs\.csv", r"written to .*confusion\.svg"
    )
    assert (play.folder / "confusion.svg").read_text().startswith("<svg")
    play.wait(lambda: "no receipt yet" not in play.type("b", "receipts"))
    play.show(SHARES, play.type("b", "receipts"), "^RECEIPT", "measured|for others")


def _held(play: Play, name: str) -> tuple[int, list[str]]:
    """Return how often a node leased its slot, and the runs whose steps it computed, in order."""
    said = play.type(name, "events", "--kind", "StageLeased", "--kind", "StepCommitted", "--json")
    events = [json.loads(line) for line in said.splitlines()]
    leased = [event["run"] for event in events if event["kind"] == "StageLeased"]
    steps = [event["run"] for event in events if event["kind"] == "StepCommitted" and event["run"] in leased]
    return len(leased), [run for run, _ in groupby(steps)]


def _many_at_once(play: Play) -> None:
    """Play 4.21: two nodes request more runs than there are slots."""
    files = [play.write(f"many-{n}.toml", RUN.format(steps=3 + n % 2, plan=ONE)) for n in range(SUBMISSIONS)]
    commands = [play.begin("ab"[n % 2], "train", file, "--wait", "5m") for n, file in enumerate(files)]
    said = [play.end(command) for command in commands]
    assert all(re.search(r"^run \w+ done", each, re.M) for each in said), "a run waits forever"
    waited = next((each for each in said if "waiting for peers" in each), "")
    play.show("4.21 exceptional, 4.21 alternative", waited, "waiting for peers: ", r"^run \w+ done")
    turns = 0
    for name in NAMES:
        leased, runs = _held(play, name)
        turns += leased
        assert len(set(runs)) == len(runs), f"two runs at once in the one slot of {name}"
    assert turns >= SUBMISSIONS


def _lost(play: Play) -> None:
    """Play 4.13, 4.15: one of two providers of a stage is killed after its assignment, and the other
    continues."""
    play.add(SPARES)
    for name in SPARES:
        play.type(name, "config", "set", "location", "spares")
    play.wait(lambda: play.type("a", "peers").count("spares") == len(SPARES))
    file = play.write("spares.toml", RUN.format(steps=12, plan=f'{ONE}\nplace = "spares"'))
    known = {name: len(play.swarm.status(name)["runs"]) for name in SPARES}
    command = play.begin("a", "train", file, "--wait", "5m")
    typed = play.typed

    def assigned() -> str:
        return next((n for n in SPARES if len(play.swarm.status(n)["runs"]) > known[n]), "")

    play.wait(lambda: bool(assigned()))
    victim = assigned()
    play.swarm.kill(victim)
    said = play.end(command)
    play.typed = f"{typed}; kill -9 PROCESS"
    play.show("4.13 exceptional", said, r"run \w+ (placing|planned|failed|waiting|recovering|running)")
    play.typed = typed
    play.show("4.13 alternative", said, r"^run \w+ done")
    play.wait(lambda: len(NAMES) + len(SPARES) - 2 == play.swarm.status("a")["members_alive"])
    spare = SPARES.replace(victim, "")
    file = play.write("still.toml", RUN.format(steps=12, plan=f'{ONE}\nplace = "spares"'))
    command = play.begin("a", "train", file, "--wait", "5m")
    typed = play.typed
    play.wait(lambda: _slots_taken(play, spare))
    _frozen(play, play.swarm.nodes[spare].process.pid)
    said = play.end(command)
    play.typed = typed
    play.show("4.15 alternative", said, r"^run \w+ done")


def _steering(play: Play) -> None:
    """Play a long run, which only its requester may stop; it is paused, resumed and revised."""
    file = play.write("long.toml", RUN.format(steps=5_000, plan=ONE))
    said = play.type("a", "train", file, "--detach")
    run = re.search(r"run (\w{16}) handed over", said)
    assert run, said
    name = run[1]

    def row(node: str) -> dict[str, Any]:
        return play.ask(node, "runs", "show", name)

    play.wait(lambda: row("a")["step"] > 3)
    play.show("Pausing and changing a run typical", play.type("a", "runs", "pause", name), "")
    play.wait(lambda: row("a")["status"] == "paused")
    at = row("a")["step"]
    play.pause(1.0)
    assert row("a")["step"] == at, "the paused run makes a step"
    play.show("Pausing and changing a run typical", play.type("a", "runs", "resume", name), "")
    play.wait(lambda: row("a")["step"] > at)
    said = play.type("a", "runs", "revise", name, "--learning-rate", "0.0005", "--priority", "7")
    play.show("Pausing and changing a run typical", said, "")
    said = play.type("b", "runs", "stop", name, code=None)
    play.show("Pausing and changing a run exceptional", said, "error:")
    play.show("Pausing and changing a run typical", play.type("a", "runs", "stop", name), "")
    play.wait(lambda: row("a")["status"] == "stopped")


def _data_that_stays(play: Play) -> None:
    """Play federated training: each node has a third of the digits, disjoint from the others'."""
    file = play.write("federated.toml", 'model = "simple-cnn"\n[train]\nfederated = true\n')
    said = play.type("a", "train", file, code=2)
    play.show(
        "Data that stays with its owner exceptional",
        said,
        'train.federated: data stays with its owners only in train.mode = "local"',
    )
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
            play.show("Data that stays with its owner typical", said, "^own_data = scans=")
    text = (
        'model = "single.peerloom"\ndata = "of-a/scans"\n[train]\nmode = "local"\nfederated = true\n'
        "steps = 500\nbatch = 16\nlocal_steps = 10\n"
    )
    said = play.type("a", "train", play.write("scans.toml", text))
    play.show("Data that stays with its owner typical", said, r"^run \w+ done, accuracy")
    rounds = play.type("b", "events", "--kind", "AveragingEnded", "--json")
    assert any(len(json.loads(line)["averaged"]) > 1 for line in rounds.splitlines()), (
        "no round averaged more than one member"
    )
    for name in NAMES:
        for path in play.swarm.nodes[name].data_dir.rglob("*"):
            if path.is_file():
                kept = path.read_bytes()
                assert not any(mark in kept for mark in marks), f"{path} contains samples"


def _leaving(play: Play) -> None:
    """Play 4.12, 4.14, 4.22: a node leaves, a node is killed, and a requester leaves during its run."""
    play.add([name for name in "fg" if name not in play.swarm.nodes])
    others = len(_alive(play)) - 1
    said = play.type("f", "leave")
    play.swarm.leave("f")
    play.show("4.12 typical, 4.22 typical", said, "")
    play.wait(lambda: play.swarm.status("a")["members_alive"] == others - 1)
    play.show("4.12 typical, 4.22 typical", play.type("a", "status"), r"members +\d others alive")
    play.swarm.kill("g")
    play.wait(lambda: play.swarm.status("a")["members_alive"] == others - 2)
    said = play.type("a", "status")
    play.typed = "kill -9 PROCESS; peerloom status"
    play.show("4.12 exceptional, 4.22 exceptional", said, r"members +\d others alive")
    plan = "stages = 1\nreplicas = 2\ntrainers = 2"
    said = play.type("c", "train", play.write("last.toml", RUN.format(steps=40, plan=plan)), "--detach")
    run = re.search(r"run (\w{16}) handed over", said)
    assert run, said
    play.show("4.12 alternative, 4.14 exceptional", said, "handed over")
    play.wait(lambda: play.ask("a", "runs", "show", run[1])["step"] > 1)
    said = play.type("c", "leave")
    play.swarm.leave("c")
    play.show("4.12 alternative, 4.14 exceptional, 4.22 alternative", said, "")
    play.wait(lambda: play.ask("a", "runs", "show", run[1])["status"] == "done")
    said = play.type("a", "runs", "show", run[1])
    play.show("4.12 alternative, 4.14 exceptional, 4.22 alternative", said, "done  step 40 of 40")
    said = play.type("b", "runs", "fetch", run[1], "--out", "later.safetensors")
    play.show("4.14 alternative", said, "")
    assert (play.folder / "later.safetensors").stat().st_size > 10_000


def _alive(play: Play) -> list[str]:
    """The running nodes."""
    return [name for name, node in play.swarm.nodes.items() if node.process.poll() is None]


PARTS: dict[str, Callable[[Play], None]] = {
    "starting": _starting,
    "settings": _settings,
    "sources": _sources,
    "peers": _peers,
    "absurd": _absurd,
    "data": _data_and_what_comes_of_it,
    "many": _many_at_once,
    "lost": _lost,
    "steering": _steering,
    "federated": _data_that_stays,
    "leaving": _leaving,
}
