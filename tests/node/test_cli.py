"""The command line: exit codes, errors of at most three lines, JSON, and which modules are not imported."""

import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from crypto.identity import Identity, peer_text
from node.cli.render import short_id
from node.config import Config
from node.control import CommandHandler, ControlServer, Emit
from node.errors import JoinTimeout, UsageError
from node.events import CapacityMeasured, NodeStarted, RunAccepted
from node.main import run
from node.state import State, apply
from node.state_documents import event_document, peers_document, status_document
from node.storage.folder import FolderStorage
from node.storage.folder_lock import lock
from node.storage.keys import load_keys

PEER = Identity(bytes(32)).peer
STATE = apply(
    State(),
    NodeStarted(
        at=1_700_000_000.0,
        peer=PEER,
        name="lab-1",
        swarm="default",
        addresses=("/ip4/192.168.1.20/tcp/9747",),
        identity_is_new=True,
        data_dir="/data",
        port_wanted=9747,
        port=9747,
        join_address="/ip4/192.168.1.20/tcp/9747",
    ),
)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the real home folder, environment variables and colours away from the tests."""
    for name in [name for name in os.environ if name.startswith(("PEERLOOM_", "XDG_DATA"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)


Runtime = Callable[[Callable[..., int]], None]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """Replace the node's process by `main`."""

    def put(main: Callable[..., int]) -> None:
        monkeypatch.setitem(sys.modules, "node.process", SimpleNamespace(main=main))

    return put


async def _status(_: dict[str, Any], emit: Emit) -> object:
    return status_document(STATE, 1_700_000_060.0, {"malformed": 2})


async def _peers(_: dict[str, Any], emit: Emit) -> object:
    return peers_document(STATE, 1_700_000_060.0)


CAPTURED = "model = 'digits.peerloom'\n"


async def _train(arguments: dict[str, Any], emit: Emit) -> object:
    assert arguments["run"]["model"] == "digits.peerloom"
    assert arguments["graph"].endswith("/digits.peerloom")
    await emit({"kind": "RunEvaluated", "run": "ab" * 8, "accuracy": 0.975, "samples": 360})
    return {"run": "ab" * 8, "status": "failed" if "fail" in arguments["path"] else "done", "accuracy": 0.975}


async def _fetch(arguments: dict[str, Any], emit: Emit) -> object:
    await trio.Path(arguments["out"]).write_bytes(b"weights")
    return {"size_bytes": 7}


HANDLERS: dict[str, CommandHandler] = {
    "status": _status,
    "peers": _peers,
    "train": _train,
    "runs.fetch": _fetch,
}


@asynccontextmanager
async def serving(folder: Path, **handlers: CommandHandler) -> AsyncIterator[trio.Nursery]:
    async with trio.open_nursery() as nursery:
        await nursery.start(ControlServer(HANDLERS | handlers, FolderStorage(folder).path).run)
        yield nursery
        nursery.cancel_scope.cancel()


async def run_in_thread(*arguments: str) -> int:
    return await trio.to_thread.run_sync(run, arguments)


NO_START = ["--join 10.0.0.5:99999", "--join no/sense", "--listen 1.2.3.4", "--announce a", "--cores many"]
BAD_INPUT = [
    *((line, 2, line + ":") for line in NO_START),
    ("--jion 10.0.0.5:9747", 2, "unknown flag --jion; did you mean --join?"),
    ("--memory lots", 2, "--memory lots: want an amount"),
    ("--preset wlan", 2, "--preset wlan: want one of lan, wan, host, local; did you mean"),
    ("--require-join soon", 2, "--require-join soon: want a time"),
    ("--config none.toml", 2, "none.toml: no such file"),
    ("--config bad.toml", 2, "bad.toml:2: unknown key 'seed' in [join]; did you mean 'seeds'?"),
    ("--config range.toml", 2, "range.toml:2: resources.cores = -1: want a whole number, 0 to 4096"),
    ("--config list.toml", 2, "seeds.txt:2: no/sense: 'no/sense' is not a host name"),
    ("--data-dir bad.toml/x id", 2, "no identity in"),
    ("--join", 2, "option '--join' requires an argument"),
    ("stats", 2, "no such command 'stats'; did you mean 'status'?"),
    ("status --jsn", 2, "unknown flag --jsn; did you mean --json?"),
    ("config", 2, "config: want a command: set"),
    ("model", 2, "model: want a command: capture, show, verify"),
    ("status now", 2, "got unexpected extra argument"),
    ("--name x status", 2, "--name before 'status': it belongs to starting a node"),
    ("train", 2, "missing argument 'RUN.toml'"),
    ("train none.toml", 2, "none.toml: no such file"),
    ("train none.toml --stepz 3", 2, "unknown flag --stepz; did you mean 'steps' in [train] of RUN.toml?"),
    ("train none.toml --learning-rate=3", 2, "did you mean 'learning_rate' in [train] of RUN.toml?"),
    ("train none.toml --detatch", 2, "unknown flag --detatch; did you mean --detach?"),
    ("train bad.toml --detach --out x", 2, "--out needs the end of the run"),
    ("runs fetch", 2, "missing argument 'RUN'"),
    ("status", 3, "no node runs on this machine (looked in ~/.local/share/peerloom/default)"),
    ("peers --data-dir nowhere", 3, "no node runs on this machine (looked in nowhere)"),
    ("--data-dir nowhere peers", 3, "no node runs on this machine (looked in nowhere)"),
    ("leave", 3, "no node runs on this machine"),
    ("runs list", 3, "no node runs on this machine"),
    ("runs fetch abcd --out x", 3, "no node runs on this machine"),
    ("train run.toml", 3, "no node runs on this machine"),
    ("train range.toml", 2, "range.toml:1: unknown key 'resources'"),
    # Bad input is refused before a node is asked and before any work of several seconds.
    ("train range.toml --out nowhere/w", 2, "--out nowhere/w: no folder "),
    ("train range.toml --out /", 2, "--out /: is a folder"),
    ("train range.toml --out /proc/w", 2, "--out /proc/w: cannot be written"),
    ("train range.toml --out bad.toml/w", 2, "--out bad.toml/w: no folder "),
    ("runs fetch abcd --out nowhere/w", 2, "--out nowhere/w: no folder "),
    ("checkpoint export abcd --out nowhere/w", 2, "--out nowhere/w: no folder "),
    ("model capture mlp -o nowhere/w.peerloom", 2, "--out nowhere/w.peerloom: no folder "),
    ("model show none.peerloom --svg nowhere/w", 2, "--svg nowhere/w: no folder "),
]


@pytest.mark.parametrize(("line", "exit_code", "message"), BAD_INPUT)
def test_bad_input_is_reported_in_at_most_three_lines(
    line: str, exit_code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.toml").write_text("[join]\nseed = ['10.0.0.5:9747']\n")
    (tmp_path / "range.toml").write_text("[resources]\ncores = -1\n")
    (tmp_path / "run.toml").write_text(CAPTURED)
    (tmp_path / "list.toml").write_text("[join]\nseed_files = ['seeds.txt']\n")
    (tmp_path / "seeds.txt").write_text("10.0.0.5:9747\nno/sense\n")
    assert run(line.split()) == exit_code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert message in said.err.splitlines()[0]
    assert len(said.err.splitlines()) <= 3
    assert "Traceback" not in said.err


def test_a_bad_environment_variable_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PEERLOOM_LISTEN", "0.0.0.0:70000")
    assert run([]) == 2
    assert capsys.readouterr().err == "error: PEERLOOM_LISTEN: 0.0.0.0:70000: port must be 1-65535\n"


def test_a_data_folder_in_use_and_a_readable_key_file_are_reported(
    tmp_path: Path, runtime: Runtime, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(config: Config, **_: object) -> int:
        storage = FolderStorage(config.data_dir)
        with lock(config.data_dir):
            load_keys(storage, os.urandom)
            return 0

    runtime(main)
    assert run(["--data-dir", "data"]) == 0
    with lock(tmp_path / "data"):
        assert run(["--data-dir", "data"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"error: this node already runs: process {os.getpid()} holds data",
        "  look: python -m node status --data-dir data          a second one: python -m node --data-dir DIR",
    ]
    (tmp_path / "data" / "identity.key").chmod(0o640)
    assert run(["--data-dir", "data"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: key file data/identity.key is open to others (mode 0640)",
        "  do: chmod 600 data/identity.key",
    ]


def test_start_passes_the_config_and_returns_the_nodes_exit_code(
    runtime: Runtime, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []

    def main(
        config: Config,
        *,
        require_join_seconds: float | None,
        report: Callable[[object], None],
        record: Path | None,
    ) -> int:
        seen.extend([config, require_join_seconds, record])
        report(STATE.started)
        return 4

    runtime(main)
    line = "--join 10.0.0.5:9747 --join [::1]:2 --name lab-1 --observer --require-join 30s --cores 2"
    assert run([*line.split(), "--record", "x"]) == 4
    config, seconds, record = seen
    assert record == Path("x")
    assert [seed.short for seed in config.join.seeds] == ["10.0.0.5:9747", "[::1]:2"]
    assert (config.name, config.observer, config.resources.cores, seconds) == ("lab-1", True, 2, 30.0)
    assert "python -m node --join 192.168.1.20:9747" in capsys.readouterr().out
    run(["--json"])
    event = json.loads(capsys.readouterr().out)
    assert (event["schema"], event["kind"]) == ("peerloom/event/1", "NodeStarted")
    assert (event["peer"], event["at"]) == (peer_text(PEER), "2023-11-14T22:13:20.000Z")


def test_errors_raised_in_a_nursery_keep_their_exit_code(
    runtime: Runtime, capsys: pytest.CaptureFixture[str]
) -> None:
    def late(*_: object, **__: object) -> int:
        raise ExceptionGroup("nursery", [ExceptionGroup("inner", [JoinTimeout("nobody answered in 30 s")])])

    def surprise(*_: object, **__: object) -> int:
        raise ValueError("boom\nsecond line")

    def interrupt(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    runtime(late)
    assert run([]) == 4
    assert capsys.readouterr().err == "error: nobody answered in 30 s\n"
    runtime(surprise)
    assert run([]) == 1
    said = capsys.readouterr().err
    assert said.splitlines()[0] == "error: unexpected ValueError: boom second line"
    assert "Traceback" not in said
    assert run(["--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err
    runtime(interrupt)
    assert run([]) == 130


async def test_status_and_peers_print_their_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(tmp_path / "data"):
        for command in ("status", "peers"):
            assert await run_in_thread(command, "--json", "--data-dir", "data") == 0
            document = json.loads(capsys.readouterr().out)
            assert document["schema"] == f"peerloom/{command}/1"
            assert await run_in_thread("--data-dir", "data", command) == 0
            assert capsys.readouterr().out
        assert await run_in_thread("runs", "--json", "--data-dir", "data") == 0
        assert json.loads(capsys.readouterr().out) == {"schema": "peerloom/runs/1", "runs": []}


async def test_the_data_folder_is_found_by_environment_or_config_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "node.toml").write_text("data_dir = 'data'\n")
    async with serving(tmp_path / "data"):
        assert await run_in_thread("status") == 3
        assert await run_in_thread("--config", "node.toml", "status") == 0
        monkeypatch.setenv("PEERLOOM_DATA_DIR", "data")
        assert await run_in_thread("status") == 0


async def test_train_states_how_it_reads_its_data_or_asks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "digits.peerloom").write_bytes(b"for the node to read")
    (tmp_path / "d.csv").write_text("a;b;kind\n1,5;2;1_1\n2,5;3;11\n3,5;4;11\n")
    (tmp_path / "RUN.toml").write_text(CAPTURED + 'data = "d.csv"\n')
    (tmp_path / "ask.toml").write_text(CAPTURED + 'data = "x.csv"\n')
    (tmp_path / "x.csv").write_text("a,y,z\n1,2,3\n4,5,6\n")
    async with serving(tmp_path / "data"):
        assert await run_in_thread("train", "RUN.toml", "--data-dir", "data") == 0
        lines = capsys.readouterr().err.splitlines()
        assert lines[0] == "data      d.csv: csv, separator ';', decimal ',', utf-8, first line is names"
        assert "classes   2 (number word samples): 0 '11' 2; 1 '1_1' 1" in lines
        assert await run_in_thread("train", "ask.toml", "--data-dir", "data") == 2
        lines = capsys.readouterr().err.splitlines()
        assert "which column is the label is not clear" in lines[0]
        assert 'data = { source = "x.csv", label = "y" }' in lines[1]
        assert len(lines) == 2


async def test_train_follows_its_run_and_fetches_the_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "digits.peerloom").write_bytes(b"for the node to read")
    (tmp_path / "RUN.toml").write_text(CAPTURED)
    (tmp_path / "fail.toml").write_text(CAPTURED)
    async with serving(tmp_path / "data"):
        here = ("--data-dir", "data")
        assert await run_in_thread("train", "RUN.toml", "--out", "w.safetensors", *here) == 0
        said = capsys.readouterr()
        assert said.out == "run abababab done, accuracy 0.975\n"
        assert said.err == "accuracy 0.975 on 360 unseen samples\nweights in w.safetensors, 7 bytes\n"
        assert (tmp_path / "w.safetensors").read_bytes() == b"weights"
        assert await run_in_thread("train", "RUN.toml", "--json", *here) == 0
        schemas = [json.loads(line)["schema"] for line in capsys.readouterr().out.splitlines()]
        assert schemas == ["peerloom/event/1", "peerloom/train/1"]
        assert await run_in_thread("train", "fail.toml", *here) == 5
        assert await run_in_thread("train", "RUN.toml", "--detach", *here) == 0
        assert (
            await run_in_thread("runs", "--data-dir", "data", "fetch", "ab", "--out", "again", "--json") == 0
        )
        assert (tmp_path / "again").read_bytes() == b"weights"


async def test_train_and_runs_list_show_peer_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No event that `train` receives names a peer that joined earlier."""
    asked = RunAccepted(at=1.0, run="ab" * 8, model="cnn", data="digits", steps=4, requester=PEER)
    state = apply(STATE, asked)

    async def train(arguments: dict[str, Any], emit: Emit) -> object:
        await emit(event_document(asked))
        return await _train(arguments, emit)

    async def status(_: dict[str, Any], emit: Emit) -> object:
        return status_document(state, 2.0, {})

    (tmp_path / "digits.peerloom").write_bytes(b"for the node to read")
    (tmp_path / "RUN.toml").write_text(CAPTURED)
    async with serving(tmp_path / "data", train=train, status=status):
        assert await run_in_thread("train", "RUN.toml", "--data-dir", "data") == 0
        assert "cnn on digits, 4 steps, from lab-1" in capsys.readouterr().err
        assert await run_in_thread("runs", "list", "--data-dir", "data") == 0
        assert f"lab-1 {short_id(peer_text(PEER))}" in capsys.readouterr().out


async def test_an_unwritable_result_is_kept_and_the_error_names_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fetch(arguments: dict[str, Any], emit: Emit) -> object:
        raise UsageError(f"--out {arguments['out']}: no space left on device")

    (tmp_path / "digits.peerloom").write_bytes(b"for the node to read")
    (tmp_path / "RUN.toml").write_text(CAPTURED)
    async with serving(tmp_path / "data", **{"runs.fetch": fetch}):
        assert await run_in_thread("train", "RUN.toml", "--out", "w.safetensors", "--data-dir", "data") == 2
        said = capsys.readouterr().err.splitlines()
        assert "no space left on device" in said[-2]
        assert said[-1] == f"  do: python -m node runs fetch {'ab' * 8} --out FILE"


async def test_leave_returns_once_the_node_has_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def leave(_: dict[str, Any], emit: Emit) -> object:
        nursery.cancel_scope.cancel()
        return None

    async with serving(tmp_path / "data", leave=leave) as nursery:
        with trio.CancelScope(shield=True):
            assert await run_in_thread("leave", "--data-dir", "data") == 0
    assert capsys.readouterr().out.startswith("lab-1  ...")


async def test_id_works_with_and_without_a_running_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = load_keys(FolderStorage(tmp_path / "data"), os.urandom)
    assert run(["id", "--json", "--data-dir", "data"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["peer"] == peer_text(keys.identity.peer)
    assert (document["schema"], document["running"]) == ("peerloom/id/1", False)
    async with serving(tmp_path / "data"):
        assert await run_in_thread("id", "--data-dir", "data") == 0
        assert capsys.readouterr().out.splitlines()[:2] == [document["peer"], "  name        lab-1"]


async def test_client_commands_load_neither_trio_nor_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from node.main import run; code = run(sys.argv[1:]);"
        "heavy = {'trio', 'torch', 'numpy', 'cryptography', 'msgspec', 'rich'} & set(sys.modules);"
        "sys.exit(f'code {code}, loaded {heavy}' if code or heavy else 0)"
    )
    async with serving(tmp_path / "data"):
        for command in ("status", "peers"):
            arguments = [command, "--json", "--data-dir", str(tmp_path / "data")]
            root = str(Path(__file__).parents[2])
            done = await trio.run_process(
                [sys.executable, "-c", program, *arguments], capture_stdout=True, check=False, cwd=root
            )
            assert done.returncode == 0
            assert json.loads(done.stdout)["schema"] == f"peerloom/{command}/1"


async def test_the_process_ends_with_the_commands_exit_code(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    done = await trio.run_process(
        [sys.executable, "-m", "node", "status", "--data-dir", str(tmp_path)],
        capture_stderr=True,
        check=False,
        cwd=root,
    )
    assert done.returncode == 3
    assert done.stderr.startswith(b"error: no node runs on this machine")


def test_help_and_version_exit_without_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    for line in ("--help", "status --help", "runs --help", "--version"):
        assert run(line.split()) == 0
    said = capsys.readouterr()
    assert "--join ADDR" in said.out
    assert said.err == ""


def test_capacity_may_be_known_before_the_node_has_started() -> None:
    # The screen must not depend on the order of the first two events, which the runtime may choose.
    from node.cli.screen import EventScreen

    capacity = CapacityMeasured(
        at=1.0,
        device="cpu",
        cores=2,
        memory_free_bytes=1,
        memory_total_bytes=2,
        flops_per_second=0.0,
        location="",
    )
    first, second = EventScreen(), EventScreen()
    assert STATE.started is not None
    started = event_document(STATE.started)
    lines = first.lines(event_document(capacity)) + first.lines(started)
    again = second.lines(started) + second.lines(event_document(capacity))
    assert sorted(lines) == sorted(again)
