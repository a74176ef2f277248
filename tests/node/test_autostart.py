"""A node as a system service: its unit file, its installation, and its messages to the service manager."""

import os
import plistlib
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from node.cli.autostart_units import AutostartService, launchd_plist, service_name, systemd_unit
from node.main import run
from node.services.notify_socket import NotifySocket
from tests.source import ROOT
from tests.test_bare_machines import QUIET, namespaces, node, start

SECONDS_MAX = 60.0
WATCHDOG_SECONDS = 0.2
FAKE_SYSTEMCTL = """#!/bin/sh
# Stands for systemd, which starts no machine in tests: notes what it is asked, and answers as it would.
echo "$@" >> "$HOME/asked"
case "$*" in
*show*) test -e "$HOME/up" && printf 'ActiveState=active\\nSubState=running\\nMainPID=7\\n' ||
    printf 'ActiveState=inactive\\nSubState=dead\\nMainPID=0\\nNRestarts=2\\nResult=watchdog\\n' ;;
*restart*) touch "$HOME/up" ;;
*disable*) rm -f "$HOME/up" ;;
esac
"""


def service(folder: Path, *words: str) -> AutostartService:
    return AutostartService(
        "peerloom", folder, [sys.executable, "-m", "node", *words], folder, {"PEERLOOM_JOIN": "a b"}
    )


def supervisor_socket(address: str) -> socket.socket:
    """Open a socket like a service manager's. A name with `@` is abstract and has no file."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listening.settimeout(SECONDS_MAX)
    listening.bind("\0" + address[1:] if address.startswith("@") else address)
    return listening


def fields(listening: socket.socket) -> Iterator[tuple[str, str]]:
    """Yield each field of each message, as (name, text)."""
    while True:
        for line in listening.recv(4_096).decode().splitlines():
            name, _, text = line.partition("=")
            yield name, text


def test_a_node_notifies_that_it_is_ready_alive_and_stopping(tmp_path: Path) -> None:
    address = f"@{tmp_path}"  # an abstract socket; the next test uses a file
    environment = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": str(int(WATCHDOG_SECONDS * 1e6))}
    command = node("--data-dir", str(tmp_path / "d"), "--name", "lab-1", *QUIET)
    with closing(supervisor_socket(address)) as listening, start(command, **environment) as process:
        try:
            told = fields(listening)
            assert next(told) == ("READY", "1")
            assert (tmp_path / "d" / "control.sock").exists()
            assert next(told) == ("WATCHDOG", "1")
            assert next(told) == ("STATUS", "lab-1, swarm default: sees 0 other nodes, no run")
            assert [next(told)[0] for _ in range(2)] == ["WATCHDOG"] * 2
            process.send_signal(signal.SIGTERM)
            assert ("STOPPING", "1") in (pair for pair in told if pair[0] != "WATCHDOG")
            process.communicate(timeout=SECONDS_MAX)
        finally:
            process.kill()
    assert process.returncode == 0


def test_a_hanging_loop_stops_the_watchdog_messages(tmp_path: Path) -> None:
    program = f"""
import os, time, trio
from node.main import run
from node.services.notify_socket import NotifySocket
async def main():
    supervisor = NotifySocket.take(os.environ)
    assert "NOTIFY_SOCKET" not in os.environ
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.keep_alive, lambda: "")
        await trio.sleep({WATCHDOG_SECONDS})
        supervisor.tell(HANGS=1)
        time.sleep({4 * WATCHDOG_SECONDS})
        supervisor.tell(HANGS=0)
        nursery.cancel_scope.cancel()
trio.run(main)
"""
    address = str(tmp_path / "notify")
    environment = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": str(int(WATCHDOG_SECONDS * 1e6))}
    with closing(supervisor_socket(address)) as listening:
        subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, env=os.environ | environment, check=True, timeout=60
        )
        told = fields(listening)
        assert next(told) == ("WATCHDOG", "1")
        assert ("HANGS", "1") in told
        assert next(told) == ("HANGS", "0")


def test_a_watchdog_meant_for_another_process_is_ignored() -> None:
    given = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": str(os.getpid() + 1)}
    assert NotifySocket.take(given).watchdog_seconds is None
    assert given == {}
    NotifySocket("/none/there").tell(READY=1)


def test_arguments_in_a_unit_file_are_quoted_for_systemd(tmp_path: Path) -> None:
    text = systemd_unit(service(tmp_path, "--name", 'a "b" \\ $HOME %i', "--location", ""))
    assert r'-m node --name "a \"b\" \\ $$HOME %%i" --location ""' in text
    assert 'Environment="PEERLOOM_JOIN=a b"' in text


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
def test_systemd_accepts_the_unit_file(tmp_path: Path) -> None:
    path = tmp_path / "peerloom.service"
    path.write_text(systemd_unit(service(tmp_path, "--name", 'a "b" $HOME %i')))
    ended = subprocess.run(
        ["systemd-analyze", "verify", "--user", str(path)],
        env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.skipif(sys.platform != "linux", reason="prctl(2)")
def test_all_fences_work_under_no_new_privileges() -> None:
    program = (
        "import ctypes; from node.stages.fences import try_fences\n"
        "before = try_fences('cpu')\n"
        "assert ctypes.CDLL(None).prctl(38, 1, 0, 0, 0) == 0\n"
        "assert try_fences('cpu') == before, before\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=SECONDS_MAX)


def test_launchd_gets_the_same_command_line(tmp_path: Path) -> None:
    told = plistlib.loads(launchd_plist(service(tmp_path, "--name", "a b")))
    assert told["ProgramArguments"][-2:] == ["--name", "a b"]
    assert told["KeepAlive"] == {"SuccessfulExit": False}
    assert told["EnvironmentVariables"]["PEERLOOM_JOIN"] == "a b"


def test_each_data_folder_has_a_service_of_its_own(tmp_path: Path) -> None:
    assert service_name(tmp_path, tmp_path) == "peerloom"
    assert service_name(tmp_path / "a b", tmp_path) == "peerloom-a_b"


@namespaces
def test_install_status_and_remove_go_through_systemd(tmp_path: Path) -> None:
    systemctl = tmp_path / "bin" / "systemctl"
    systemctl.parent.mkdir()
    systemctl.write_text(FAKE_SYSTEMCTL)
    systemctl.chmod(0o755)
    settings = tmp_path / "node.toml"
    settings.write_text('name = "lab-1"\n')
    booted = 'mount -t tmpfs none /run && mkdir -p /run/systemd/system && cd "$HOME" && exec "$@"'

    def typed(*words: str) -> tuple[int, list[str], list[str]]:
        command = ["unshare", "-rm", "sh", "-c", booted, "-", *node("autostart", *words)]
        path = f"{systemctl.parent}:{os.environ['PATH']}"
        with start(command, HOME=str(tmp_path), PATH=path, PEERLOOM_UPLOAD="1MB/s") as process:
            said, errors = process.communicate(timeout=SECONDS_MAX)
        return process.returncode, said.splitlines(), errors.splitlines()

    code, _, errors = typed("status")
    assert (code, errors[1]) == (3, f"  do: {sys.executable} -m node autostart install")
    code, said, errors = typed("install", "--config", "node.toml", "--no-lan")
    assert (code, errors) == (0, [])
    unit = tmp_path / ".config/systemd/user/peerloom.service"
    assert said[0] == "wrote ~/.config/systemd/user/peerloom.service"
    assert any(line.startswith("it stops when you log out") for line in said)
    folder = tmp_path / ".local/share/peerloom/default"
    words = f"ExecStart={sys.executable} -m node --no-lan --config node.toml --data-dir {folder}"
    assert {words, f"WorkingDirectory={tmp_path}", "Environment=PEERLOOM_UPLOAD=1MB/s"} <= set(
        unit.read_text().splitlines()
    )
    code, said, _ = typed("status")
    assert (code, said[0]) == (0, "peerloom  active: active (running)")
    (tmp_path / "up").unlink()
    code, said, _ = typed("status")
    assert (code, said[0]) == (3, "peerloom  not active: inactive (dead), watchdog")
    assert typed("remove")[0] == 0
    assert not unit.exists()
    assert typed("remove")[0] == 3
    changes = [line for line in (tmp_path / "asked").read_text().splitlines() if "show" not in line]
    assert changes == [
        "--user daemon-reload",
        "--user enable peerloom.service",
        "--user restart peerloom.service",
        "--user disable --now peerloom.service",
        "--user daemon-reload",
    ]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("install",), "would start the node"),
        (("install", "--print", "--jion", "x"), "unknown flag --jion; did you mean --join?"),
        (("install", "--print", "--config", "none.toml"), "none.toml: no such file"),
        (("install", "--print", "status"), "want flags of a node, not a command"),
    ],
)
def test_an_impossible_installation_is_refused_before_any_write(
    words: tuple[str, ...],
    what: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if not words[1:] and Path("/run/systemd/system").exists():
        pytest.skip("this machine has systemd")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run(["autostart", *words]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert what in errors[0]
    assert len(errors) <= 2
    assert not list(tmp_path.iterdir())
