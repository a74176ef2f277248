"""Sends alerts: as events, and with a webhook or a command of the user's choice.

The webhook gets one POST of JSON, `{"schema": "peerloom/alert/1", "kind", "about", "level", "text",
"is_raised", "node"}`. The command is run without a shell and gets the same values in `PEERLOOM_ALERT_*` of
its environment. Both may fail or hang, so they have a time limit and are then dropped. The text is written by
the rules.
"""

import json
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import trio

from node.alerts.rules import Alert, AlertRules, Facts
from node.config import Config
from node.containment import contain
from node.events import AlertCleared, AlertRaised, Event
from node.history import EventHistory
from node.seams import Seams

LOOK_SECONDS = 2.0
TELLING_SECONDS_MAX = 10.0
TELLINGS_MAX = 8
"""Maximum number of webhooks and commands running at the same time. Further alerts are only events."""


class AlertingNode(Protocol):
    """The part of `node.runtime.Node` that alerts use."""

    config: Config
    seams: Seams

    @property
    def history(self) -> EventHistory: ...
    @property
    def counters(self) -> dict[str, int]: ...
    def publish(self, event: Event) -> None: ...


class Alerts:
    """Checks the rules every two seconds, until cancelled."""

    def __init__(self, node: AlertingNode, disk: Callable[[Path], tuple[int, int]] | None = None) -> None:
        self._node = node
        self._rules = AlertRules()
        self._seen = 0
        self._raised: dict[tuple[str, str], Alert] = {}
        self._tellings = 0
        self._disk = disk or _disk

    async def run(self) -> None:
        """Check the rules, and send new alerts, until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                for event in self.look():
                    self._node.publish(event)
                    nursery.start_soon(self._tell, event)
                await trio.sleep(LOOK_SECONDS)

    def look(self) -> list[AlertRaised | AlertCleared]:
        """Return the alerts that were raised and cleared since the last call."""
        for _, event in self._node.history.after(self._seen):
            self._rules.take(event)
        self._seen = self._node.history.last
        clock = self._node.seams.clock
        free, total = self._disk(self._node.config.data_dir)
        errors = self._node.counters.get("protocol_errors", 0)
        found = self._rules.look(Facts(clock.monotonic(), clock.wall(), free, total, errors))
        new = [alert for key, alert in found.items() if key not in self._raised]
        gone = [alert for key, alert in self._raised.items() if key not in found]
        self._raised = found
        at = clock.wall()
        return [
            *(
                AlertRaised(at=at, alert=each.kind, about=each.about, level=each.level, text=each.text)
                for each in new
            ),
            *(AlertCleared(at=at, alert=each.kind, about=each.about) for each in gone),
        ]

    async def _tell(self, event: AlertRaised | AlertCleared) -> None:
        wanted = self._node.config.alerts
        if self._tellings >= TELLINGS_MAX or not (wanted.webhook or wanted.command):
            return
        is_raised = isinstance(event, AlertRaised)
        document = {
            "schema": "peerloom/alert/1",
            "kind": event.alert,
            "about": event.about,
            "level": event.level if isinstance(event, AlertRaised) else "",
            "text": event.text if isinstance(event, AlertRaised) else "no longer so",
            "is_raised": is_raised,
            "node": self._node.config.name,
        }
        self._tellings += 1
        try:
            with contain("telling of an alert"), trio.move_on_after(TELLING_SECONDS_MAX):
                if wanted.webhook:
                    await trio.to_thread.run_sync(_post, wanted.webhook, document, abandon_on_cancel=True)
                if wanted.command:
                    await _perform(wanted.command, document)
        finally:
            self._tellings -= 1


def _disk(folder: Path) -> tuple[int, int]:
    """Return free and total bytes, or zeros if the system does not report them."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return 0, 0
    return usage.free, usage.total


def _post(url: str, document: dict[str, object]) -> bool:
    """POST a document; return whether it was accepted. Redirects are not followed: the user chose the URL,
    but not the target of a redirect."""
    request = urllib.request.Request(  # noqa: S310 - the configuration allows http and https alone
        url, json.dumps(document).encode(), {"content-type": "application/json"}, method="POST"
    )
    opener = urllib.request.build_opener(_NoRedirect)
    try:
        with opener.open(request, timeout=TELLING_SECONDS_MAX) as answer:
            return bool(200 <= answer.status < 300)
    except (OSError, ValueError):
        return False


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *arguments: object) -> None:
        """Do not follow redirects."""


async def _perform(command: tuple[str, ...], document: dict[str, object]) -> None:
    said = {f"PEERLOOM_ALERT_{name.upper()}": str(value) for name, value in document.items()}
    try:
        await trio.run_process(
            list(command),
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **said},
        )
    except OSError:
        return  # there is no such program; the event has still reported the alert
