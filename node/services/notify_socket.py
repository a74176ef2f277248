"""Reports this process's state (ready, alive, its activity, stopping) to the service supervisor that started
it.

It sends the datagrams of sd_notify(3) to the socket that the environment names. If the environment names
none, nothing is sent. Not here: the unit that requests the datagrams (`node.cli.autostart_units`). Sources:
sd_notify(3), sd_watchdog_enabled(3), systemd.service(5) "WatchdogSec=".
"""

import os
import socket
from collections.abc import Callable, MutableMapping

import trio

STATUS_SECONDS = 10.0
"""Seconds between status updates if there is no watchdog, which would set its own interval."""
_SIGNS_OF_LIFE = 2
"""Number of keepalives within the watchdog's time, as sd_watchdog_enabled(3) advises."""
_VARIABLES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


class NotifySocket:
    """The socket of the service manager. The manager ends this process after `watchdog_seconds` without a
    keepalive; None means never."""

    def __init__(self, address: str, watchdog_seconds: float | None = None) -> None:
        self._address = address
        self.watchdog_seconds = watchdog_seconds

    @classmethod
    def take(cls, environ: MutableMapping[str, str]) -> "NotifySocket":
        """Return the socket that `environ` names, and remove its variables, because processes that this one
        starts are not the service."""
        address, silence_usec, process = (environ.pop(name, "") for name in _VARIABLES)
        is_watched = silence_usec.isdecimal() and int(silence_usec) > 0 and process in ("", str(os.getpid()))
        return cls(address, int(silence_usec) / 1e6 if is_watched else None)

    def tell(self, **fields: str | int) -> None:
        """Send fields such as `READY=1`. Does nothing if there is no manager, or the manager does not
        listen."""
        path = self._address
        if not path.startswith(("/", "@")):
            return  # there is none, or it is a machine's host (vsock), which cannot have started this process
        if path.startswith("@"):  # an abstract name, without a file, as unix(7) writes it
            path = "\0" + path[1:]
        lines = "\n".join(f"{name}={value}" for name, value in fields.items())
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as way:
            way.setblocking(False)
            try:
                way.sendto(lines.encode(), path)
            except OSError:
                return  # the manager is busy or gone, and decides what silence means

    async def keep_alive(self, status: Callable[[], str]) -> None:
        """Report that the event loop runs, and changes of its status, until cancelled.

        This is a task of the event loop. So if the loop hangs, no keepalive is sent, and the supervisor
        restarts the node.
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
