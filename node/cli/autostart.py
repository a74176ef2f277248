"""`peerloom autostart`: install a node as a service that starts with the machine and restarts after failures.

It uses systemd's user supervisor on Linux and launchd on macOS. `node.cli.autostart_units` makes the text of
their files, and `node.services.notify_socket` reports the running node's state to systemd.
"""

import getpass
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from node.cli.autostart_units import (
    AutostartService,
    launchd_label,
    launchd_plist,
    service_name,
    systemd_unit,
)
from node.cli.client import is_running
from node.cli.options import AsJson, CommandGroup, DataDir, find_data_dir
from node.cli.render import labelled, show, show_json
from node.errors import NoNode, PeerloomError, UsageError
from node.invocation import command_span, service_words
from node.paths import default_data_dir, short_path

ANSWER_SECONDS_MAX = 240.0
"""Time limit for one call of the service supervisor. Starting the service waits until the node listens."""
BOOTED = Path("/run/systemd/system")
"""This folder exists if systemd started the machine (sd_booted(3))."""
_PASSED_ON = {"ignore_unknown_options": True}
_SHOWN = (
    "LoadState",
    "ActiveState",
    "SubState",
    "StatusText",
    "MainPID",
    "NRestarts",
    "UnitFileState",
    "Result",
)

app = typer.Typer(
    cls=CommandGroup, no_args_is_help=True, rich_markup_mode=None, help="Start a node with this machine."
)


@app.command("install", context_settings=_PASSED_ON)
def install(
    context: typer.Context,
    flags: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FLAGS]...", help="Flags of the node, as `peerloom --help` lists them."),
    ] = None,
    config: Annotated[str, typer.Option(metavar="FILE", help="The node's settings file.")] = "",
    data_dir: DataDir = "",
    is_printed: Annotated[bool, typer.Option("--print", help="Print the unit, and change nothing.")] = False,
) -> None:
    """Start a node now and whenever this machine starts, and restart it after failures."""
    before: dict[str, Any] = context.obj or {}
    config = config or before.get("config") or ""
    words = [*(flags or ()), *(("--config", config) if config else ())]
    service = _service(context, words, data_dir or before.get("data_dir") or "")
    text = launchd_plist(service).decode() if _is_mac() else systemd_unit(service)
    if is_printed:
        sys.stdout.write(text)
        return
    supervisor = _supervisor(service.name, service.words)
    if is_running(service.data_dir) and not supervisor.state()["active"]:
        raise UsageError(
            f"a node that was started by hand already holds {short_path(service.data_dir)}",
            f"run {command_span('leave', '--data-dir', str(service.data_dir))}, then repeat this command",
        )
    supervisor.file.parent.mkdir(parents=True, exist_ok=True)
    supervisor.file.write_text(text, encoding="utf-8")
    supervisor.start()
    show(
        [
            f"wrote {short_path(supervisor.file)}",
            f"the node runs, and starts with this machine; {supervisor.log_hint}",
        ]
    )
    show(supervisor.hints())


@app.command("remove")
def remove(context: typer.Context, data_dir: DataDir = "") -> None:
    """Stop the installed node, and do not start it again. Its data folder stays."""
    supervisor = _installed(context, data_dir)
    supervisor.stop()
    supervisor.file.unlink(missing_ok=True)
    supervisor.forget()
    show([f"removed {short_path(supervisor.file)}; the data folder was not changed"])


@app.command("status")
def status(context: typer.Context, data_dir: DataDir = "", as_json: AsJson = False) -> None:
    """Show whether the installed node runs. Exit code 3 if it does not."""
    supervisor = _installed(context, data_dir)
    state = supervisor.state()
    if as_json:
        show_json({"schema": "peerloom/autostart/1", "unit": str(supervisor.file), **state})
    else:
        show(_status_lines(supervisor, state))
    if not state["active"]:
        raise typer.Exit(NoNode.exit_code)


def _status_lines(supervisor: "Systemd", state: Mapping[str, Any]) -> list[str]:
    lines = [f"{supervisor.name}  {'active' if state['active'] else 'not active'}: {state['detail']}"]
    lines.append(labelled("unit", short_path(supervisor.file)))
    if state["process"]:
        lines.append(labelled("process", str(state["process"])))
    if state["text"]:
        lines.append(labelled("status", state["text"]))
    if state["restarts"]:
        lines.append(labelled("restarts", str(state["restarts"])))
    return [*lines, labelled("log", supervisor.log_hint)]


def _service(context: typer.Context, flags: Sequence[str], data_dir: str) -> AutostartService:
    """Check these flags, and return the service that starts a node with them. Raises UsageError."""
    from node import config

    root = context.find_root().command
    typed = [*flags, *(("--data-dir", data_dir) if data_dir else ())]
    parsed = root.make_context("peerloom", typed)
    # If the flags contain a command, `status` is left over as a second one.
    if root.make_context("peerloom", [*typed, "status"]).args:
        raise UsageError(
            f"autostart install {shlex.join(flags)}: want flags of a node, not a command",
            "`peerloom --help`",
        )
    given = {name: value for name, value in parsed.params.items() if value not in (None, False, "", [], ())}
    if given.pop("no_lan", False):
        given["lan"] = False
    settings = config.resolve(given, os.environ)
    folder = Path(os.path.abspath(settings.data_dir))
    known = {rule.environment for rule in config.RULES} | {"PEERLOOM_CONFIG"}
    kept = {name: text for name, text in os.environ.items() if name in known - {"PEERLOOM_DATA_DIR"}}
    words = [*service_words(), *flags, "--data-dir", str(folder)]
    name = service_name(folder, default_data_dir(os.environ))
    return AutostartService(name, folder, words, Path.cwd(), dict(sorted(kept.items())))


def _installed(context: typer.Context, data_dir: str) -> "Systemd":
    """Return the supervisor of the service for this data folder. Raises NoNode if no service is installed."""
    folder = Path(os.path.abspath(find_data_dir(context, data_dir)))
    supervisor = _supervisor(service_name(folder, default_data_dir(os.environ)), ())
    if not supervisor.file.exists():
        raise NoNode(
            f"no node of {short_path(folder)} starts with this machine", "`peerloom autostart install`"
        )
    return supervisor


@dataclass(frozen=True)
class Systemd:
    """This user's service supervisor. This class is for systemd; the subclass is for launchd on macOS."""

    name: str

    @property
    def file(self) -> Path:
        base = os.environ.get("XDG_CONFIG_HOME", "")
        folder = Path(base) if os.path.isabs(base) else Path.home() / ".config"
        return folder / "systemd" / "user" / f"{self.name}.service"

    @property
    def log_hint(self) -> str:
        return f"journalctl --user -u {self.name} -f"

    def start(self) -> None:
        self._call("daemon-reload")
        self._call("enable", self.file.name)
        self._call("restart", self.file.name)

    def stop(self) -> None:
        self._call("disable", "--now", self.file.name)

    def forget(self) -> None:
        self._call("daemon-reload")

    def state(self) -> dict[str, Any]:
        said = self._call("show", self.file.name, f"--property={','.join(_SHOWN)}")
        found = dict(line.partition("=")[::2] for line in said.splitlines() if "=" in line)
        active, result = found.get("ActiveState", "unknown"), found.get("Result", "success")
        detail = f"{active} ({found.get('SubState', '')})" + ("" if result == "success" else f", {result}")
        process = int(found.get("MainPID") or 0)
        restarts = int(found.get("NRestarts") or 0)
        return {
            "active": active in ("active", "reloading"),
            "detail": detail,
            "process": process or None,
            "restarts": restarts,
            "text": found.get("StatusText", ""),
        }

    def hints(self) -> list[str]:
        """Return further advice: without lingering, the user's services end when the user logs out."""
        user = getpass.getuser()
        lingers = _said(["loginctl", "show-user", user, "--property=Linger", "--value"])
        if lingers == "yes":
            return []
        return [f"it stops when you log out; to keep it running: loginctl enable-linger {user}"]

    def _call(self, *words: str) -> str:
        return _run(["systemctl", "--user", *words], self.log_hint)


class Launchd(Systemd):
    """The service supervisor of macOS."""

    @property
    def file(self) -> Path:
        return Path.home() / "Library" / "LaunchAgents" / f"{launchd_label(self.name)}.plist"

    @property
    def log_hint(self) -> str:
        return "tail -f service.log in its data folder"

    @property
    def _domain(self) -> str:
        return f"gui/{os.getuid()}"

    @property
    def _target(self) -> str:
        return f"{self._domain}/{launchd_label(self.name)}"

    def start(self) -> None:
        if self.state()["active"]:
            self.stop()
        _run(["launchctl", "bootstrap", self._domain, str(self.file)], self.log_hint)

    def stop(self) -> None:
        _said(["launchctl", "bootout", self._target])

    def forget(self) -> None:
        """Do nothing, because launchd forgets a service that was booted out."""

    def state(self) -> dict[str, Any]:
        said = _said(["launchctl", "print", self._target]) or ""
        rows = (line.strip().partition(" = ") for line in said.splitlines())
        found = {name: text for name, _, text in reversed(list(rows))}
        process = int(found["pid"]) if found.get("pid", "").isdecimal() else None
        return {
            "active": process is not None,
            "detail": found.get("state", "not loaded"),
            "process": process,
            "restarts": max(0, int(found["runs"]) - 1) if found.get("runs", "").isdecimal() else 0,
            "text": "",
        }

    def hints(self) -> list[str]:
        return ["it runs while you are logged in"]


def _is_mac() -> bool:
    return sys.platform == "darwin"


def _supervisor(name: str, words: Sequence[str]) -> Systemd:
    """Return the service supervisor of this machine. Raises UsageError if it has no known one."""
    if _is_mac():
        return Launchd(name)
    has_systemd = shutil.which("systemctl") is not None
    if not (has_systemd and BOOTED.is_dir()):
        missing = "was not started by systemd" if has_systemd else "has no systemd"
        command = shlex.join(words) if words else "`peerloom`"
        raise UsageError(
            f"this machine {missing}, which would start the node",
            f"let this machine's own supervisor run this and stop it with SIGTERM: {command}",
        )
    bus = f"/run/user/{os.getuid()}"
    if "XDG_RUNTIME_DIR" not in os.environ and os.path.isdir(bus):
        os.environ["XDG_RUNTIME_DIR"] = bus  # su and sudo leave it out
    return Systemd(name)


def _said(words: Sequence[str]) -> str | None:
    """Return a program's output, or None if it fails or is missing."""
    try:
        ended = subprocess.run(words, capture_output=True, text=True, check=True, timeout=ANSWER_SECONDS_MAX)  # noqa: S603 - service managers, by names of ours
    except (OSError, subprocess.SubprocessError):
        return None
    return ended.stdout.strip()


def _run(words: Sequence[str], log_hint: str) -> str:
    """Run a service supervisor and return its output. Raises PeerloomError with its message."""
    what = " ".join(words[:4])
    try:
        ended = subprocess.run(words, capture_output=True, text=True, check=False, timeout=ANSWER_SECONDS_MAX)  # noqa: S603 - as above
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerloomError(f"{what}: {error}", f"look: {log_hint}") from None
    if ended.returncode == 0:
        return ended.stdout
    said = next(iter(ended.stderr.strip().splitlines()), f"it ended with {ended.returncode}")
    if "bus" in said.lower():
        user = getpass.getuser()
        raise UsageError(
            f"{what}: {said}",
            f"log in as {user} directly, not with su; or run loginctl enable-linger {user}, then repeat this",
        )
    raise PeerloomError(f"{what}: {said}", f"look: {log_hint}")
