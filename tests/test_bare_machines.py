"""Nodes on machines that lack something: a home folder, room on the disk, a writable folder, locks.

Each machine runs in its own namespaces (unshare(1)), where the test's user may mount a small disk. The tests
are skipped if the system forbids that.
"""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

from node.cli.client import ask
from node.errors import NoNode
from tests.source import ROOT

STRANGER = 12_345
"""A user id that is in no user list, like that of a container with an arbitrary uid."""
FORM = f"{sys.executable} -m node"
"""The command that these tests start a node with, and so the form in which advice names the command."""
QUIET = ("--listen", "127.0.0.1:0", "--no-lan", "--web", "off")


@cache
def can_unshare() -> bool:
    if shutil.which("unshare") is None:
        return False
    tried = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return subprocess.run(tried, check=False, capture_output=True).returncode == 0


namespaces = pytest.mark.skipif(not can_unshare(), reason="the system lets this user make no namespaces")


def start(command: Sequence[str], **more: str) -> "subprocess.Popen[str]":
    environment = {key: text for key, text in os.environ.items() if not key.startswith(("XDG_", "PEERLOOM_"))}
    environment |= {"PYTHONPATH": str(ROOT), "PEERLOOM_CALIBRATE": "false", **more}
    for key in [key for key, text in environment.items() if not text]:
        del environment[key]
    return subprocess.Popen(
        command, cwd="/", env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def ended(command: Sequence[str], **more: str) -> tuple[int, list[str]]:
    """Return the exit code of a command that must end by itself, and the lines of its errors."""
    with start(command, **more) as process:
        try:
            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    return process.returncode, errors.splitlines()


def wait_for_node(process: "subprocess.Popen[str]", folder: Path) -> None:
    """Wait until the node answers."""
    until = time.monotonic() + 30
    while True:
        try:
            ask(folder, "status")
            return
        except NoNode:
            assert time.monotonic() < until
        with suppress(subprocess.TimeoutExpired):
            pytest.fail(f"it ended with {process.wait(0.05)}: {process.communicate()}")


def node(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "node", *arguments]


def on_mount(folder: Path, options: str, before: str, *arguments: str) -> list[str]:
    """Run a node's command on a machine whose disk is mounted at `folder`, after a line of shell on that
    machine."""
    script = f'mount -t tmpfs -o {options} none "$0" && cd "$0" && {before} && exec "$@"'
    return ["unshare", "-rm", "sh", "-c", script, str(folder), *node(*arguments)]


@namespaces
@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (QUIET, "no folder for data"),
        (("status",), "no folder for data"),
        (("--data-dir", "~/x", *QUIET), "--data-dir ~/x"),
        (("model", "show", "~/x"), "this user has no home folder"),
    ],
)
def test_a_user_without_a_home_must_name_a_folder(arguments: Sequence[str], what: str) -> None:
    stranger = ["unshare", "--user", f"--map-user={STRANGER}", f"--map-group={STRANGER}"]
    code, errors = ended([*stranger, *node(*arguments)], HOME="")
    assert code == 2
    assert errors[0].startswith(f"error: {what}")
    assert "HOME is not set" in errors[0]
    assert len(errors) <= 3


@namespaces
def test_a_node_without_a_home_runs_in_a_named_folder(tmp_path: Path) -> None:
    stranger = ["unshare", "--user", f"--map-user={STRANGER}", f"--map-group={STRANGER}"]
    with start([*stranger, *node("--data-dir", str(tmp_path), *QUIET)], HOME="") as process:
        try:
            wait_for_node(process, tmp_path)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, errors) == (0, "")


@namespaces
def test_a_disk_full_at_the_start_is_one_error(tmp_path: Path) -> None:
    command = on_mount(tmp_path, "size=4k", "mkdir d", "--data-dir", str(tmp_path / "d"), *QUIET)
    assert ended(command) == (
        2,
        [
            f"error: data folder {tmp_path}/d: no space left on device",
            f"  do: make room there, or give the node a folder of its own: {FORM} --data-dir DIR",
        ],
    )


@namespaces
def test_a_node_whose_disk_fills_continues_and_reports_it_once(tmp_path: Path) -> None:
    flags = ("--data-dir", f"{tmp_path}/d", "--log", "text", *QUIET)
    with start(on_mount(tmp_path, "size=1m", "mkdir d", *flags)) as process:
        try:
            there = Path(f"/proc/{process.pid}/root{tmp_path}")
            wait_for_node(process, there / "d")
            with (there / "fill").open("wb", buffering=0) as fill, suppress(OSError):
                while True:
                    fill.write(bytes(4_096))
            assert shutil.disk_usage(there).free == 0
            for number in range(80):  # more than fits into the unused space of the files' last pages
                ask(there / "d", "config.set", {"name": "upload", "value": f"{number + 1}MB/s"})
                if number % 10 == 0:
                    ask(there / "d", "dht.put", {"key": f"{number}", "value": "ab" * 400})
            assert ask(there / "d", "status")["schema"] == "peerloom/status/1"
            (there / "fill").unlink()
            before = (there / "d" / "events.log").read_text()
            ask(there / "d", "config.set", {"name": "upload", "value": "1MB/s"})
            assert (there / "d" / "events.log").read_text().count("\n") == before.count("\n") + 1
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 0
    assert [line for line in errors.splitlines() if "no space left on device" in line] == errors.splitlines()
    assert len(errors.splitlines()) == 1


@namespaces
def test_a_read_only_data_folder_is_named_with_its_reason(tmp_path: Path) -> None:
    command = on_mount(
        tmp_path,
        "size=64k",
        'mkdir -m 700 d && mount -o remount,ro "$0"',
        "--data-dir",
        f"{tmp_path}/d",
        *QUIET,
    )
    assert ended(command) == (
        2,
        [
            f"error: data folder {tmp_path}/d: its file system is read-only",
            f"  do: give the node a folder of its own: {FORM} --data-dir DIR",
        ],
    )


@namespaces
def test_a_machine_without_a_temporary_folder_gets_an_error(tmp_path: Path) -> None:
    read_only = "mkdir d && mount -o remount,ro,bind / && cd /"
    command = on_mount(tmp_path, "size=1m", read_only, "--data-dir", f"{tmp_path}/d", *QUIET)
    code, errors = ended(command, TMPDIR="")
    if code == 1 and "remount" in errors[0]:
        pytest.skip("the system lets nobody make its root read-only")
    assert code == 2
    assert errors == [
        "error: no folder for temporary files can be written to, /tmp neither",
        "  do: make room in /tmp, or set TMPDIR to another folder",
    ]


def test_a_file_system_without_locks_is_an_error_of_the_data_folder(tmp_path: Path) -> None:
    """Network file systems without a lock service return ENOLCK, and cannot be set up here, so the test fakes
    one."""
    program = f"""
import fcntl, runpy, sys
def lockf(*_): raise OSError({errno.ENOLCK}, "No locks available")
fcntl.lockf = lockf
sys.argv[0] = "node"
runpy.run_module("node", run_name="__main__")
"""
    command = [sys.executable, "-c", program, "--data-dir", str(tmp_path), *QUIET]
    assert ended(command) == (
        2,
        [
            f"error: data folder {tmp_path}: its file system does not support locks (no locks available)",
            "  do: give the node a folder of its own: python -m node --data-dir DIR",
        ],
    )
