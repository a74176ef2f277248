"""Many channels over one connection, with flow control by credit, for two peers with a single path (relayed
or punched).

A sans-IO core. Frames are the messages of a sealed, ordered connection; a channel carries bytes both ways as
a TCP connection does. The rules:

* A sender has credit for each channel, as HTTP/2 and yamux grant it, so a reader that pauses stops its own
  channel and no other. Credit grows for a reader that keeps up, up to a bound for all channels together.
* The path's delay bounds the bytes in flight (`path_window`). So a probe does not wait behind a long queue in
  a relay or a router, however large their buffers are.
* Control frames leave first. Channels take turns by deficit, and a channel that had nothing queued goes
  before those that are busy (FQ-CoDel, RFC 8290), so a small message overtakes bulk.
* A ping tests whether the peer is there. Its state does not grow with the peer's input.

The driver is `node.transport.multiplexed`; this module does not know what channels are used for.
"""

import struct
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from enum import IntEnum
from typing import assert_never

from crypto.errors import LocalProtocolError, RemoteProtocolError
from node.transport.path_window import PathWindow
from node.transport.settings import PATHS, PathSettings

DATA_BYTES_MAX = 2**14
"""Size of one bulk frame. A probe may have to wait for one frame in this node: 13 ms at 10 Mbit/s."""
FRAME_BYTES_MAX = DATA_BYTES_MAX + 16
CHANNELS_MAX = 128
"""Maximum number of channels that the peer may have open: twice the number of connections that one peer may
have here."""
CREDIT_BYTES = 2**18
"""Number of bytes that may come on a new channel before its reader takes any."""
CREDIT_BYTES_MAX = 2**21
"""The maximum for a channel whose reader keeps up: 160 Mbit/s over a round trip of 100 ms."""
GRANTED_BYTES_MAX = 2**24
"""Maximum credit of all readers together, beyond CREDIT_BYTES for each."""
ACKNOWLEDGED_BYTES = 2**14
QUEUED_BYTES_MAX = 2**16
"""The limit of queued, unsent bytes of one channel."""
CONTROL_MAX = 4 * CHANNELS_MAX
"""Maximum number of waiting control frames. More means that a peer asks but does not read the answers."""

_HEAD = struct.Struct(">BI")
_CREDIT = struct.Struct(">BII")
_ACKNOWLEDGED = struct.Struct(">BQ")
_CHANNEL_MAX = 2**32 - 2
_CREDIT_MAX = 2**32 - 1


class Kind(IntEnum):
    """The first byte of a frame. All but ACKNOWLEDGED name a channel, or a ping, in the next four."""

    OPEN = 0
    DATA = 1
    CREDIT = 2
    """Grants the channel this many more bytes (four bytes)."""
    CLOSE = 3
    """The sender will neither send nor accept anything more on the channel."""
    ACKNOWLEDGED = 4
    """The total bytes of DATA that the path has delivered (eight bytes)."""
    PING = 5
    PONG = 6


@dataclass(frozen=True)
class ChannelOpened:
    """The peer has opened a channel."""

    channel: int


@dataclass(frozen=True)
class ChannelData:
    """Bytes have come on a channel. Call `taken` once its reader has them."""

    channel: int
    data: memoryview


@dataclass(frozen=True)
class ChannelClosed:
    """The peer has closed a channel. The reader still gets earlier bytes, but the channel is gone."""

    channel: int


Event = ChannelOpened | ChannelData | ChannelClosed


@dataclass(slots=True)
class _Channel:
    credit: int = CREDIT_BYTES
    """Number of bytes that may still be sent."""
    queue: deque[memoryview] = field(default_factory=deque)
    queued_bytes: int = 0
    deficit: int = 0
    window: int = CREDIT_BYTES
    awaited: int = CREDIT_BYTES
    """Number of bytes that may still come."""
    ungranted: int = 0
    """Number of bytes that the reader has taken and for which no new credit was given yet."""
    untaken: int = 0
    """Number of received bytes that the reader has not taken yet."""
    taken_since: int = 0
    """Number of bytes that the reader has taken since its window was last checked."""
    is_closing: bool = False
    """Whether the channel was closed on this side. CLOSE is sent after the bytes that are still queued."""


class Multiplexer:
    """One end of a path. `is_first` is true only for the node that dialled."""

    def __init__(self, now: float, *, is_first: bool, settings: PathSettings = PATHS) -> None:
        self._settings = settings
        self._own, self._theirs = (1, 2) if is_first else (2, 1)
        self._last_theirs = 0
        self._parity = self._theirs % 2
        self._channels: dict[int, _Channel] = {}
        self._others = 0
        self._control: deque[bytes] = deque()
        self._credits: OrderedDict[int, int] = OrderedDict()
        self._pong: int | None = None
        self._fresh: OrderedDict[int, None] = OrderedDict()
        self._busy: OrderedDict[int, None] = OrderedDict()
        self._granted = 0
        self._came = self._told = 0
        self._window = PathWindow()
        self._ping = 0
        self._pinged_at = self._ticked_at = now
        self._is_awaiting = self._is_doubted = False
        self.round_trip_seconds: float | None = None
        """The round trip of the latest answered ping."""

    # --- state for the driver ------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._channels)

    def __contains__(self, channel: object) -> bool:
        return channel in self._channels

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """The size and limit of each table that the peer can make grow."""
        return {
            "channels": (self._others, CHANNELS_MAX),
            "control": (len(self._control), CONTROL_MAX),
            "granted": (self._granted, GRANTED_BYTES_MAX),
        }

    @property
    def deadline(self) -> float:
        """When to call `tick` at the latest."""
        if self._is_awaiting:
            return self._pinged_at + (
                self._settings.doubted_seconds if self._is_doubted else self._settings.dead_seconds
            )
        return self._pinged_at + (
            self._settings.ping_seconds if self._channels else self._settings.idle_ping_seconds
        )

    def is_silent(self, now: float) -> bool:
        """Return whether the peer has left a ping unanswered for long."""
        return self._is_awaiting and now - self._pinged_at >= self._settings.silent_seconds

    def room(self, channel: int) -> int:
        """Return how many bytes `write` accepts now."""
        found = self._channels.get(channel)
        if found is None or found.is_closing:
            return 0
        return max(0, min(found.credit, QUEUED_BYTES_MAX) - found.queued_bytes)

    # --- calls by this node --------------------------------------------------------------------------

    def open(self) -> int:
        """Open a channel. Raises LocalProtocolError if there are too many, or if the path has used up its
        numbers."""
        if len(self._channels) - self._others >= CHANNELS_MAX or self._own > _CHANNEL_MAX:
            raise LocalProtocolError("no more channels on this path")
        channel, self._own = self._own, self._own + 2
        self._channels[channel] = _Channel()
        self._control.append(_HEAD.pack(Kind.OPEN, channel))
        return channel

    def write(self, channel: int, data: bytes) -> None:
        """Queue bytes, at most `room` of them."""
        if len(data) > self.room(channel):
            raise LocalProtocolError("more bytes than the peer has room for")
        if data:
            found = self._channels[channel]
            if channel not in self._fresh and channel not in self._busy:
                self._fresh[channel] = None
                found.deficit = DATA_BYTES_MAX
            found.queue.append(memoryview(data))
            found.queued_bytes += len(data)

    def taken(self, channel: int, count: int) -> None:
        """Note that the reader of a channel has taken this many of the received bytes."""
        found = self._channels.get(channel)
        if found is None:
            return
        found.ungranted += count
        found.untaken -= count
        found.taken_since += count
        self._grow(found)
        if found.ungranted >= found.window // 4:
            self._credits[channel] = self._credits.get(channel, 0) + found.ungranted
            found.awaited += found.ungranted
            found.ungranted = 0

    def close(self, channel: int) -> None:
        """Stop sending and receiving once the queued bytes have left."""
        found = self._channels.get(channel)
        if found is None or found.is_closing:
            return
        found.is_closing = True
        if not found.queue:
            self._finish(channel)

    def _grow(self, channel: _Channel) -> None:
        """Give more credit to a reader that has taken a whole window and has little left to take."""
        if channel.taken_since < channel.window:
            return
        more = min(channel.window, GRANTED_BYTES_MAX - self._granted, CREDIT_BYTES_MAX - channel.window)
        if channel.untaken <= channel.window // 4:
            channel.window += more
            channel.ungranted += more
            self._granted += more
        channel.taken_since = 0

    def _finish(self, channel: int) -> None:
        self._control.append(_HEAD.pack(Kind.CLOSE, channel))
        self._forget(channel)

    def _forget(self, channel: int) -> None:
        found = self._channels.pop(channel)
        self._granted -= found.window - CREDIT_BYTES
        self._others -= channel % 2 == self._parity
        for table in (self._fresh, self._busy, self._credits):
            table.pop(channel, None)

    # --- frames from the peer ------------------------------------------------------------------------

    def receive(self, now: float, frame: bytes) -> Event | None:
        """Take a frame. Raises RemoteProtocolError, after which the path must end."""
        self._is_awaiting = self._is_doubted = False
        if len(frame) > FRAME_BYTES_MAX or not frame or frame[0] > Kind.PONG:
            raise RemoteProtocolError("a frame that is empty, too long or of an unknown kind")
        kind = Kind(frame[0])
        if kind is Kind.ACKNOWLEDGED:
            self._window.acknowledge(now, *_read(_ACKNOWLEDGED, frame))
            return None
        if kind is Kind.CREDIT:
            self._credit(*_read(_CREDIT, frame))
            return None
        if kind is Kind.DATA:
            (channel,) = _read(_HEAD, frame[: _HEAD.size])
            return self._take(channel, memoryview(frame)[_HEAD.size :])
        (number,) = _read(_HEAD, frame)
        match kind:
            case Kind.OPEN:
                return self._opened(number)
            case Kind.CLOSE:
                return self._closed(number)
            case Kind.PING:
                self._pong = number
            case Kind.PONG:
                if number == self._ping:
                    self._window.measure(now, now - self._pinged_at)
                    self.round_trip_seconds = now - self._pinged_at
            case _:
                assert_never(kind)
        return None

    def _opened(self, channel: int) -> ChannelOpened | None:
        if channel % 2 != self._parity or channel <= self._last_theirs or channel > _CHANNEL_MAX:
            raise RemoteProtocolError("a channel number that the peer may not open")
        if len(self._control) >= CONTROL_MAX:
            raise RemoteProtocolError("more channels opened than answers could be sent")
        self._last_theirs = channel
        if self._others >= CHANNELS_MAX:
            self._control.append(_HEAD.pack(Kind.CLOSE, channel))
            return None
        self._others += 1
        self._channels[channel] = _Channel()
        return ChannelOpened(channel)

    def _take(self, channel: int, data: memoryview) -> ChannelData | None:
        if not data:
            raise RemoteProtocolError("a data frame without data")
        self._came += len(data)
        found = self._known(channel)
        if found is None or found.is_closing:
            return None
        if len(data) > found.awaited:
            raise RemoteProtocolError("more bytes than there was credit for")
        found.awaited -= len(data)
        found.untaken += len(data)
        return ChannelData(channel, data)

    def _credit(self, channel: int, more: int) -> None:
        found = self._known(channel)
        if found is not None:
            found.credit += more
            if found.credit > _CREDIT_MAX:
                raise RemoteProtocolError("credit without end")

    def _closed(self, channel: int) -> ChannelClosed | None:
        found = self._known(channel)
        if found is None:
            return None
        self._forget(channel)
        # If this node has closed the channel too, its end is gone and gets no event.
        return None if found.is_closing else ChannelClosed(channel)

    def _known(self, channel: int) -> _Channel | None:
        """Return a channel; None if it is over. Raises RemoteProtocolError if there never was such a
        channel."""
        last = self._last_theirs if channel % 2 == self._parity else self._own - 2
        if not 0 < channel <= last:
            raise RemoteProtocolError("a channel that was never opened")
        return self._channels.get(channel)

    # --- outgoing frames -----------------------------------------------------------------------------

    def tick(self, now: float) -> bool:
        """Ping if that is due; return False if the peer is gone."""
        due_at, self._ticked_at = max(self.deadline, self._ticked_at), now
        if now < self.deadline:
            return True
        if self._is_awaiting and now < due_at + self._settings.late_seconds:
            return False
        self._ask(now)
        return True

    def doubt(self, now: float) -> None:
        """Ping now, and wait less long for the answer, because there is evidence that the path is dead."""
        if not self._is_awaiting or now - self._ticked_at > self._settings.late_seconds:
            self._ask(now)
        self._is_doubted = True

    def _ask(self, now: float) -> None:
        self._ping = (self._ping + 1) % 2**32
        self._pinged_at = now
        self._is_awaiting = True
        self._control.append(_HEAD.pack(Kind.PING, self._ping))

    def next_frame(self, now: float) -> bytes | None:
        """Return the next frame to send; None if there is nothing to send until something else happens."""
        if self._pong is not None:
            number, self._pong = self._pong, None
            return _HEAD.pack(Kind.PONG, number)
        if self._came - self._told >= ACKNOWLEDGED_BYTES:
            self._told = self._came
            return _ACKNOWLEDGED.pack(Kind.ACKNOWLEDGED, self._came)
        if self._control:
            return self._control.popleft()
        if self._credits:
            channel, more = self._credits.popitem(last=False)
            return _CREDIT.pack(Kind.CREDIT, channel, more)
        frame = self._next_data(now)
        if frame is None and self._came > self._told:
            self._told = self._came
            return _ACKNOWLEDGED.pack(Kind.ACKNOWLEDGED, self._came)
        return frame

    def _next_data(self, now: float) -> bytes | None:
        is_full = self._window.is_full(DATA_BYTES_MAX)
        if self._fresh:
            # A channel's first bytes always leave: one frame for each channel does not form a queue.
            channel = next(iter(self._fresh))
        elif is_full or not self._skip_empty():
            if is_full and self._busy:
                self._window.hold_back()
            return None
        else:
            channel = next(iter(self._busy))
        if is_full:
            self._window.hold_back()
        found = self._channels[channel]
        frame = self._cut(channel, found, DATA_BYTES_MAX)
        found.deficit -= len(frame) - _HEAD.size
        if not found.queue or found.deficit <= 0:
            # A channel with an empty queue keeps its slot until this point, so that refilled bulk does not
            # count as fresh.
            self._fresh.pop(channel, None)
            self._busy[channel] = None
            self._busy.move_to_end(channel)
        if found.deficit <= 0:
            found.deficit += DATA_BYTES_MAX
        if not found.queue and found.is_closing:
            self._finish(channel)
        self._window.send(now, len(frame) - _HEAD.size)
        return frame

    def _skip_empty(self) -> bool:
        """Remove channels that have nothing to send from the round; return whether any other channel
        remains."""
        while self._busy:
            channel = next(iter(self._busy))
            if self._channels[channel].queue:
                return True
            del self._busy[channel]
        return False

    def _cut(self, channel: int, found: _Channel, count: int) -> bytes:
        """Return a frame with up to `count` of the waiting bytes."""
        pieces = [_HEAD.pack(Kind.DATA, channel)]
        left = count
        while left and found.queue:
            piece = found.queue.popleft()
            if len(piece) > left:
                found.queue.appendleft(piece[left:])
                piece = piece[:left]
            left -= len(piece)
            pieces.append(bytes(piece))
        found.queued_bytes -= count - left
        found.credit -= count - left
        return b"".join(pieces)


def _read(form: struct.Struct, frame: bytes) -> tuple[int, ...]:
    """Return the numbers after the frame's kind. Raises RemoteProtocolError."""
    if len(frame) != form.size:
        raise RemoteProtocolError("a frame of the wrong length")
    return tuple(form.unpack(frame)[1:])
