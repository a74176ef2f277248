"""Files that start a node together with the machine: a unit for systemd, a property list for launchd. Pure
text.

Sources: systemd.service(5), systemd.exec(5), systemd.syntax(7), launchd.plist(5).
"""

import plistlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from node.errors import UsageError

WATCHDOG_SECONDS = 60
"""A node without a sign of life for this long is restarted. Its event loop never computes, but a machine that
swaps may delay it for some seconds."""
START_SECONDS_MAX = 180
"""Time limit until a node listens. It first measures its processor, which is slow on a busy machine."""
STOP_SECONDS_MAX = 30
"""Time limit for stopping. A node ends itself after half of this time (`node.process.END_SECONDS_MAX`)."""
AGAIN_SECONDS = 5
"""The pause between a failure and the next start."""
LABEL = "peerloom"


@dataclass(frozen=True)
class AutostartService:
    """A node as a service: its command, folder and environment variables."""

    name: str
    data_dir: Path
    words: Sequence[str]
    folder: Path
    environment: Mapping[str, str]


def service_name(data_dir: Path, default: Path) -> str:
    """Return a name for the service: `peerloom` for the default folder; otherwise it includes the folder's
    own name."""
    if data_dir == default:
        return LABEL
    return f"{LABEL}-{re.sub(r'[^A-Za-z0-9_.]+', '_', data_dir.name) or 'node'}"


def systemd_unit(service: AutostartService) -> str:
    """Return the text of a unit for `systemctl --user`. Raises UsageError if a word cannot be written in a
    unit."""
    variables = {"PYTHONUNBUFFERED": "1", **service.environment}
    lines = [
        "# Written by `peerloom autostart install`, which writes it anew.",
        "[Unit]",
        f"Description=Peerloom node in {_escaped(str(service.data_dir))}",
        "StartLimitIntervalSec=300",
        "StartLimitBurst=10",
        "",
        "[Service]",
        "Type=notify",
        "NotifyAccess=main",
        f"WorkingDirectory={_escaped(str(service.folder))}",
        *(f"Environment={_quoted(f'{name}={text}')}" for name, text in variables.items()),
        f"ExecStart={' '.join(map(_command_word, service.words))}",
        "Restart=on-failure",
        f"RestartSec={AGAIN_SECONDS}",
        "# A flag, a setting or an address is wrong: a restart does not help.",
        f"RestartPreventExitStatus={UsageError.exit_code}",
        f"WatchdogSec={WATCHDOG_SECONDS}",
        f"TimeoutStartSec={START_SECONDS_MAX}",
        f"TimeoutStopSec={STOP_SECONDS_MAX}",
        "# The node is told to leave, and ends its stages itself.",
        "KillMode=mixed",
        "# Out of memory, the kernel kills a stage before the node, which goes on without it.",
        "OOMPolicy=continue",
        "UMask=0077",
        "# A stage can still set up its fences under these. RestrictNamespaces, MemoryDenyWriteExecute,",
        "# PrivateDevices and SystemCallFilter are left out: each breaks a fence, a graphics card or torch.",
        "NoNewPrivileges=yes",
        "LockPersonality=yes",
        "RestrictSUIDSGID=yes",
        "RestrictRealtime=yes",
        "RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK",
        "SystemCallArchitectures=native",
        "",
        "[Install]",
        "WantedBy=default.target",
    ]
    return "\n".join(lines) + "\n"


def launchd_label(name: str) -> str:
    """Return the name of a service for launchd."""
    return f"org.peerloom.{name}"


def launchd_plist(service: AutostartService) -> bytes:
    """Return a property list for `launchctl bootstrap`."""
    log = str(service.data_dir / "service.log")
    return plistlib.dumps(
        {
            "Label": launchd_label(service.name),
            "ProgramArguments": list(service.words),
            "WorkingDirectory": str(service.folder),
            "EnvironmentVariables": {"PYTHONUNBUFFERED": "1", **service.environment},
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": AGAIN_SECONDS,
            "ExitTimeOut": STOP_SECONDS_MAX,
            "Umask": 0o077,
            "StandardOutPath": log,
            "StandardErrorPath": log,
        }
    )


def _command_word(word: str) -> str:
    return _quoted(word).replace("$", "$$")


def _quoted(word: str) -> str:
    """Return a word for a unit, quoted if necessary (systemd.syntax(7), "Quoting")."""
    text = _escaped(word)
    if word and re.fullmatch(r"[\w./:=@,+-]+", word, re.ASCII):
        return text
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{quoted}"'


def _escaped(text: str) -> str:
    """Return a text with its specifiers escaped. Raises UsageError if it has a line break."""
    if not text.isprintable():
        raise UsageError(f"{text!r} cannot be written in a systemd unit", "use names without line breaks")
    return text.replace("%", "%%")
