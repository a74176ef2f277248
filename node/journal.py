"""Applies each event of this node to its state, records and reports it, and sends it to watchers."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node import state as views
from node import state_documents
from node.containment import note
from node.events import Event, StrangerRefused
from node.history import EventHistory
from node.recording.recorder import Recorder
from node.seams import Clock

SUBSCRIBER_EVENTS_MAX = 10_000
"""Maximum number of events queued for one watcher. If a watcher stops reading, it loses the newest events, so
that the node does not run out of memory."""
REFUSALS_SHOWN = (100, 1_000, 10_000, 100_000, 1_000_000)
"""Garbage is counted; the screen shows a line only when the count reaches one of these values."""


class Journal:
    """The events of one node, and `counts` of what it refused or dropped, by reason."""

    def __init__(
        self, clock: Clock, report: Callable[[Event], None] | None, recorder: Recorder | None
    ) -> None:
        self.state = views.State()
        self.history = EventHistory()
        self.counts: Counter[str] = Counter()
        self._clock = clock
        self.report = report
        self._recorder = recorder
        self._watchers: list[trio.MemorySendChannel[Event]] = []

    def publish(self, event: Event) -> None:
        """Apply, record and report an event. A failure of the screen must not disturb the protocol that
        emitted the event."""
        try:
            self.state = views.apply(self.state, event)
        except Exception as error:
            note(error, f"the state at a {type(event).__name__}")
        self.history.append(event)
        if self._recorder is not None:
            self._recorder.event(state_documents.event_document(event))
        try:
            if self.report is not None:
                self.report(event)
        except Exception as error:
            note(error, f"the screen at a {type(event).__name__}")
        for watcher in self._watchers:
            try:
                watcher.send_nowait(event)
            except trio.WouldBlock:
                self.counts["events_lost_by_slow_watchers"] += 1

    @contextmanager
    def watch(self) -> Iterator[trio.MemoryReceiveChannel[Event]]:
        """Yield a channel with all events from now on."""
        send, receive = trio.open_memory_channel[Event](SUBSCRIBER_EVENTS_MAX)
        self._watchers.append(send)
        try:
            yield receive
        finally:
            self._watchers.remove(send)

    def refuse(self, peer: PeerId, error: RemoteProtocolError) -> None:  # noqa: ARG002 - counted, not named
        """Count a peer's violation of the protocol, and report it at some counts."""
        reason = "protocol_errors"
        self.counts[reason] += 1
        if self.counts[reason] in REFUSALS_SHOWN:
            count = self.counts[reason]
            self.publish(StrangerRefused(at=self._clock.wall(), reason=str(error)[:200], count=count))
