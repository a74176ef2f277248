"""Live updates for open pages: numbered deltas that are encoded once for all pages.

A page begins with a snapshot and then gets the deltas after its number. There is no queue for each page: a
page has a position in one ring of deltas, and if it falls out of the ring it gets a new snapshot. While no
page is open, events are only added to charts and metrics.
"""

from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import trio

from node import state_documents
from node.history import EventHistory
from node.state import State
from node.web import views
from node.web.charts import POINT_COLUMNS, Charts
from node.web.metrics import Metrics
from node.web.settings import WebSettings

TICK_SECONDS = 0.5
"""Seconds between updates of open pages; a death must be visible within two seconds."""
IDLE_TICK_SECONDS = 2.0
COUNTERS_SECONDS = 1.0
DELTA_BYTES_KEPT_MAX = 4 << 20
EVENTS_PER_DELTA_MAX = 100
EVENTS_IN_SNAPSHOT_MAX = 100
HEARTBEAT_SECONDS = 15.0


class Live:
    """The deltas of one node. `state`, `counters` and `limits` are read again at each tick."""

    def __init__(
        self,
        history: EventHistory,
        *,
        boot: str,
        state: Callable[[], State],
        counters: Callable[[], Mapping[str, int]],
        limits: Callable[[], Mapping[str, Any]],
        links: Callable[[], Mapping[str, float]],
        ways: Callable[[], Mapping[str, str]] = dict,
        wall: Callable[[], float],
        deltas_kept_max: int = WebSettings.deltas_kept_max,
    ) -> None:
        self._deltas_kept_max = deltas_kept_max
        self.boot = boot
        self.charts = Charts()
        self.metrics = Metrics()
        self.watchers = 0
        self.number = 0
        self._history = history
        self._read_state = state
        self._counters = counters
        self._limits = limits
        self._limited = limits()
        self._links = links
        self._linked: dict[str, float] = {}
        self._ways = ways
        self._led: dict[str, str] = {}
        self._wall = wall
        self._shown = State()
        self._seen = 0
        self._ring: deque[tuple[int, bytes]] = deque()
        self._ring_bytes = 0
        self._changed = trio.Event()
        self._arrived = trio.Event()
        self._counted: dict[str, int] = {}
        self._counted_at = 0.0
        self._snapshot: tuple[int, bytes] | None = None

    async def run(self) -> None:
        """Process events and update open pages, until cancelled."""
        while True:
            self.tick()
            if self.watchers:
                await trio.sleep(TICK_SECONDS)
            else:
                self._arrived = trio.Event()
                with trio.move_on_after(IDLE_TICK_SECONDS):
                    await self._arrived.wait()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count an open page; deltas are made while there is one."""
        self.watchers += 1
        self._arrived.set()
        try:
            yield
        finally:
            self.watchers -= 1

    async def follow(self, after: int | None) -> AsyncGenerator[tuple[int, str, bytes], None]:
        """Yield without end (number, kind, JSON): first a snapshot, or the deltas `after` a number, then
        further deltas. The kind is reset, delta, or an empty beat."""
        position = after
        while True:
            if position is None or position > self.number or (self._ring_start() > position):
                self.tick()
                position = self.number  # read it now, because more happens while a snapshot is being sent
                yield position, "reset", self.snapshot()
            for number, data in [each for each in self._ring if each[0] > position]:
                if number <= position or self._ring_start() > position:
                    break  # the page read too slowly and fell out of the ring
                position = number
                yield number, "delta", data
            if position >= self.number:
                with trio.move_on_after(HEARTBEAT_SECONDS) as scope:
                    await self._changed.wait()
                if scope.cancelled_caught:
                    yield position, "beat", b""

    def snapshot(self) -> bytes:
        """Return a page's first state as JSON. All pages at the same number share one."""
        if self._snapshot is None or self._snapshot[0] != self.number:
            self._snapshot = (self.number, msgspec.json.encode(self._whole()))
        return self._snapshot[1]

    def tick(self) -> None:
        """Process the events since the previous call, and make a delta of them while a page is open."""
        state, events = self._read_state(), self._history.after(self._seen)
        points: dict[str, list[object]] = {}
        marks: dict[str, list[object]] = {}
        for _, event in events:
            self.metrics.take(event)
            new_points, new_marks = self.charts.take(event)
            for run, point in new_points:
                points.setdefault(run, []).append(point)
            for run, mark in new_marks:
                marks.setdefault(run, []).append(mark)
        self._seen = self._history.last
        before, self._shown = self._shown, state
        if not self.watchers:
            if events:
                self._forget()
            return
        delta = self._delta(before, state)
        if events:
            newest = events[-EVENTS_PER_DELTA_MAX:]
            delta["events"] = [_event_row(number, event) for number, event in newest]
            delta["events_skipped"] = len(events) - len(newest)
        delta |= {name: found for name, found in (("points", points), ("marks", marks)) if found}
        if delta:
            self._keep(delta)

    def _delta(self, before: State, state: State) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        rows, gone = views.members_changed(before, state)
        runs, ended = views.runs_changed(before, state)
        found = {"members": rows, "gone": gone, "runs": runs, "runs_gone": ended}
        delta |= {name: value for name, value in found.items() if value}
        if before.alerts is not state.alerts:
            delta["alerts"] = views.alert_rows(state)
        now = self._wall()
        counters = self._counted
        if abs(now - self._counted_at) >= COUNTERS_SECONDS:
            self._counted_at = now
            counters = dict(self._counters())
            linked = dict(self._links())
            if linked != self._linked:
                delta["links"] = self._linked = linked
            led = dict(self._ways())
            if led != self._led:
                delta["ways"] = self._led = led
        limited = self._limits()
        if counters != self._counted or limited != self._limited or not _same_node(before, state):
            self._counted, self._limited = counters, limited
            delta["node"] = views.node_document(state, counters, limited)
        return delta

    def _whole(self) -> dict[str, Any]:
        state = self._shown
        self._counted = dict(self._counters())
        self._linked = dict(self._links())
        self._led = dict(self._ways())
        events = self._history.after(self._seen - EVENTS_IN_SNAPSHOT_MAX)
        return {
            "schema": "peerloom/page/1",
            "boot": self.boot,
            "number": self.number,
            "at": self._wall(),
            "node": views.node_document(state, self._counted, self._limits()),
            "member_columns": views.MEMBER_COLUMNS,
            "members": [views.member_row(member) for member in state.members.values()],
            "links": self._linked,
            "ways": self._led,
            "alerts": views.alert_rows(state),
            "point_columns": POINT_COLUMNS,
            "runs": [views.run_row(view) for view in views.shown_runs(state).values()],
            "events": [_event_row(number, event) for number, event in events if number <= self._seen],
        }

    def _keep(self, delta: dict[str, Any]) -> None:
        self.number += 1
        data = msgspec.json.encode({"number": self.number, "at": self._wall(), **delta})
        self._ring.append((self.number, data))
        self._ring_bytes += len(data)
        while len(self._ring) > self._deltas_kept_max or self._ring_bytes > DELTA_BYTES_KEPT_MAX:
            self._ring_bytes -= len(self._ring.popleft()[1])
        self._wake()

    def _forget(self) -> None:
        """Drop all deltas, because events happened without a delta. Returning pages begin with a snapshot."""
        self.number += 1
        self._ring.clear()
        self._ring_bytes = 0
        self._wake()

    def _ring_start(self) -> int:
        """Return the lowest number after which every delta is still in the ring."""
        return self._ring[0][0] - 1 if self._ring else self.number

    def _wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


def _event_row(number: int, event: Any) -> dict[str, Any]:
    return {"number": number, **state_documents.event_document(event)}


def _same_node(before: State, state: State) -> bool:
    return all(
        getattr(before, name) is getattr(state, name)
        for name in ("started", "capacity", "fences", "joins", "reachability", "refused", "page")
    )
