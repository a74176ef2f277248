"""Several nodes of one swarm as processes of this machine: started, asked, killed, and never left behind.

Each node is a process group of its own. So Ctrl-C reaches only the starter, and a node dies together with its
stage. Each node holds one end of a pipe whose other end the starter holds (`node.child_node`), so that it
ends even if the starter is killed. Synchronous, standard library only.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from node.cli.client import ask, is_running
from node.cli.render import short_address
from node.errors import NoNode, PeerloomError
from node.invocation import PROGRAM_GIVEN, program_from_anywhere
from node.paths import ENVIRONMENT_PREFIX

HOST = "127.0.0.1"
START_SECONDS_MAX = 60.0
"""Time limit for a node to answer. It takes about a second on a quiet machine."""
ENDING_SECONDS_MAX = 10.0
"""Time limit for all nodes to leave; those that still run are then killed."""
LOOK_SECONDS = 0.03
"""Polling interval for changes that no event announces."""
LAST_LINES = 8
"""Number of lines of a node's output that are shown when it fails."""
_REAP_SECONDS_MAX = 2.0
"""Time limit for a killed process to end; only a stuck kernel call takes longer."""
_SOURCE_ROOT = str(Path(__file__).parents[2])

_UNFENCED = {f"{ENVIRONMENT_PREFIX}ALLOW_UNFENCED": "true"}
"""Settings of every node. The nodes compute only what this user requests, so they also run without a sandbox
on systems that lack one."""

Pause = Callable[[float], None]
"""A function that waits for some seconds, and raises when the user stops."""


@dataclass(frozen=True)
class Neighbour:
    """A started node: its process, and how to reach it."""

    name: str
    peer: str
    address: str
    data_dir: Path
    process: "subprocess.Popen[bytes]"


class NodeEnded(PeerloomError):
    """A node ended unexpectedly, or did not start. `lines` is the end of its output."""

    def __init__(self, what: str, lines: Sequence[str]) -> None:
        super().__init__(what)
        self.lines = lines


class SwarmProcesses:
    """The nodes of one swarm, below `folder`. Always call `close` at the end.

    The preset `host` notices a killed process within a second or two, at the price of five probes per second.
    It does not declare a process dead if a busy machine halts it for 3 s. Set `calibrate` only if the nodes'
    plan matters, because calibration takes a core for some seconds per node.
    """

    def __init__(
        self,
        folder: Path,
        swarm: str,
        pause: Pause,
        *,
        preset: str = "host",
        with_page: str = "",
        calibrate: bool = True,
    ) -> None:
        self.folder = folder
        self._preset = preset
        self._with_page = with_page
        self._settings = _UNFENCED | {f"{ENVIRONMENT_PREFIX}CALIBRATE": str(calibrate).lower()}
        self.nodes: dict[str, Neighbour] = {}
        self._swarm = swarm
        self._pause = pause
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._ended: set[str] = set()

    def launch(self, names: Sequence[str], settings: Mapping[str, str] | None = None) -> None:
        """Start a process for each name. The processes load their modules in parallel, then wait for `start`.
        `settings` are added to their environment. A killed node may be launched again."""
        # A killed process cannot clean up. Its temporary files are here, so they are removed with this
        # folder.
        temporary = self.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        for name in names:
            self._ended.discard(name)
            if (former := self._processes.get(name)) is not None and former.stdin is not None:
                with contextlib.suppress(OSError):
                    former.stdin.close()
            with open(self.log(name), "ab") as log:
                self._processes[name] = subprocess.Popen(
                    [sys.executable, "-P", "-m", "node.child_node"],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=_environment(os.environ)
                    | {"TMPDIR": str(temporary)}
                    | self._settings
                    | dict(settings or {}),
                    start_new_session=True,
                )

    def start(self, name: str, join: str | None, flags: Sequence[str] = ()) -> Neighbour:
        """Make a launched process a node that joins through the address `join`. Return once it answers.
        `flags` are added to its command line.

        Raises:
            NodeEnded: it ended, or did not answer in time.
        """
        data_dir = self.folder / name
        # Discovery is off, because another demo on this machine must not join this swarm.
        arguments = ["--data-dir", str(data_dir), "--listen", f"{HOST}:0", "--no-lan", "--name", name]
        arguments += ["--web", f"{HOST}:0" if name == self._with_page else "off"]
        arguments += ["--swarm", self._swarm, "--preset", self._preset, "--device", "cpu", "--cores", "1"]
        arguments += [*(["--join", join] if join is not None else []), *flags]
        process = self._processes[name]
        assert process.stdin is not None
        # the process ended, which is reported below with its output
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(arguments).encode() + b"\n")
            process.stdin.flush()
        until = time.monotonic() + START_SECONDS_MAX
        while (status := self._status(data_dir)) is None:
            self.check()
            if time.monotonic() > until:
                raise self._failure(name, f"did not answer within {START_SECONDS_MAX:.0f} s")
            self._pause(LOOK_SECONDS)
        address = short_address(status["addresses"][0])
        self.nodes[name] = node = Neighbour(name, status["peer"], address, data_dir, process)
        return node

    def status(self, name: str) -> dict[str, Any]:
        """Return the status document of a node. Raises NoNode."""
        document: dict[str, Any] = ask(self.nodes[name].data_dir, "status")
        return document

    def page(self, name: str) -> str:
        """Return the link to a node's page. Raises NoNode."""
        document: dict[str, Any] = ask(self.nodes[name].data_dir, "page")
        return str(document["link"])

    def check(self) -> None:
        """Raise NodeEnded if a node has ended without being killed or asked to leave."""
        for name, process in self._processes.items():
            if name not in self._ended and process.poll() is not None:
                raise self._failure(name, _epitaph(process.returncode))

    def kill(self, name: str) -> float:
        """Send SIGKILL to a node and its stage, like a power cut. Return the Unix time in seconds."""
        self._ended.add(name)
        at = time.time()
        process = self.nodes[name].process
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return at

    def leave(self, name: str) -> None:
        """Let one node leave. Return once its process has ended. Raises PeerloomError."""
        self._ended.add(name)
        process = self.nodes[name].process
        process.terminate()
        until = time.monotonic() + ENDING_SECONDS_MAX
        while process.poll() is None:
            if time.monotonic() > until:
                raise PeerloomError(
                    f"node {name} was asked to leave but runs after {ENDING_SECONDS_MAX:.0f} s"
                )
            self._pause(LOOK_SECONDS)
        _end_group(process)

    def close(self) -> None:
        """Let all running nodes leave, and kill those that do not end. Raises nothing."""
        # Use a signal, which makes a node leave, and not the control channel: a hung node must not block us.
        running = [process for process in self._processes.values() if process.poll() is None]
        for process in running:
            process.terminate()
        until = time.monotonic() + ENDING_SECONDS_MAX
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
                _end_group(process)
        self.kill_all()

    def kill_all(self) -> None:
        """End every process immediately. May be called more than once, and from a signal handler."""
        for process in list(self._processes.values()):
            if process.poll() is None:
                _end_group(process)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    # Without a limit, this could wait forever for a lock that the interrupted code holds.
                    process.wait(_REAP_SECONDS_MAX)
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()

    def log(self, name: str) -> Path:
        """Return the file of a node's output."""
        return self.folder / f"{name}.log"

    def keep_logs(self, folder: Path) -> None:
        """Copy the nodes' output into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in self._processes:
            shutil.copy(self.log(name), folder / f"{name}.log")

    def _status(self, data_dir: Path) -> dict[str, Any] | None:
        """Return the status of a node, or None if it is not up yet."""
        if is_running(data_dir):
            with contextlib.suppress(NoNode):
                document: dict[str, Any] = ask(data_dir, "status")
                return document if document["addresses"] else None
        return None

    def _failure(self, name: str, how: str) -> "NodeEnded":
        lines = self.log(name).read_text(errors="replace").splitlines()
        return NodeEnded(f"node {name} {how}", [line for line in lines if line.strip()][-LAST_LINES:])


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """Send SIGKILL to the rest of a process's group. Right after the process has ended, no other group has
    its number yet."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment without variables that would configure the nodes."""
    kept = {name: value for name, value in environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
    kept[PROGRAM_GIVEN] = program_from_anywhere()
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, (_SOURCE_ROOT, environ.get("PYTHONPATH"))))
    return kept


def _epitaph(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
