"""Reports this process's state to the service supervisor that started it: ready, alive, its activity,
stopping.

The datagrams of sd_notify(3), to the socket that the environment names; without one nothing is sent. Not
here: the unit that requests them (`node.cli.autostart_units`). Sources: sd_notify(3), sd_watchdog_enabled(3),
systemd.service(5) "WatchdogSec=".
"""

import os
import socket
from collections.abc import Callable, MutableMapping

import trio

STATUS_SECONDS = 10.0
"""The interval of status updates without a watchdog, which sets its own interval."""
_SIGNS_OF_LIFE = 2
"""Keepalives within the watchdog's time, as sd_watchdog_enabled(3) advises."""
_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class NotifySocket:
    """The socket of the service manager. It ends this process after `watchdog_seconds` without a keepalive;
    None: never."""

    def __init__(self, address: str, watchdog_seconds: float | None = None) -> None:
        self._address = address
        self.watchdog_seconds = watchdog_seconds

    @classmethod
    def take(cls, environ: MutableMapping[str, str]) -> "NotifySocket":
        """Return the socket that `environ` names, and take its variables away: processes that this one starts
        are not the service."""
        address, silence_usec, process = (environ.pop(name, "") for name in _VARIABLES)
        is_watched = silence_usec.isdecimal() and int(silence_usec) > 0 and process in ("", str(os.getpid()))
        return cls(address, int(silence_usec) / 1e6 if is_watched else None)

    def tell(self, **fields: str | int) -> None:
        """Send fields such as `READY=1`. Without a manager, or where it does not listen, nothing happens."""
        path = self._address
        if not path.startswith(("/", "@")):
            return  # none, or a machine's host (vsock), which starts no process of this one
        if path.startswith("@"):  # a name without a file, as unix(7) writes it
            path = "\0" + path[1:]
        lines = "\n".join(f"{name}={value}" for name, value in fields.items())
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as way:
            way.setblocking(False)
            try:
                way.sendto(lines.encode(), path)
            except OSError:
                return  # the manager is busy or gone; it decides what silence means

    async def keep_alive(self, status: Callable[[], str]) -> None:
        """Report that the event loop runs, and changes of its status, until cancelled.

        It is a task of the event loop, so that a hanging loop is silent, and the supervisor restarts the
        node.
        """
        watched = self.watchdog_seconds
        pause = STATUS_SECONDS if watched is None else watched / _SIGNS_OF_LIFE
        told = None
        while self._address:
            text = " ".join(status().split())
            changed = {"STATUS": text} if text != told else {}
            self.tell(**({} if watched is None else {"WATCHDOG": 1}) | changed)
            told = text
            await trio.sleep(pause)
