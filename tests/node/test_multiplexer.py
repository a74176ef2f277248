"""The multiplexer of a path: bytes arrive in order, small messages overtake bulk data, and memory stays
bounded.
"""

from collections import deque
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from crypto.errors import LocalProtocolError, RemoteProtocolError
from node.transport.multiplexer import (
    CHANNELS_MAX,
    CREDIT_BYTES,
    DATA_BYTES_MAX,
    ChannelClosed,
    ChannelData,
    ChannelOpened,
    Event,
    Kind,
    Multiplexer,
)
from node.transport.path_window import QUEUE_SECONDS, WINDOW_BYTES_MIN
from node.transport.settings import PATHS


def pair() -> tuple[Multiplexer, Multiplexer]:
    return Multiplexer(0.0, is_first=True), Multiplexer(0.0, is_first=False)


def pump(now: float, one: Multiplexer, other: Multiplexer) -> list[Event]:
    """Deliver everything that one end sends to the other, and return the resulting events."""
    found = []
    while (frame := one.next_frame(now)) is not None:
        event = other.receive(now, frame)
        if event is not None:
            found.append(event)
    return found


def opened(one: Multiplexer, other: Multiplexer) -> int:
    channel = one.open()
    assert pump(0.0, one, other) == [ChannelOpened(channel)]
    return channel


def fill(mux: Multiplexer, channel: int) -> None:
    mux.write(channel, bytes(mux.room(channel)))


# --- channels ------------------------------------------------------------------------------------------


def test_both_ends_open_channels_that_carry_bytes_both_ways() -> None:
    one, other = pair()
    first, second = opened(one, other), opened(other, one)
    assert first != second
    one.write(first, b"to the other")
    other.write(second, b"to the one")
    assert pump(0.0, one, other) == [ChannelData(first, memoryview(b"to the other"))]
    assert pump(0.0, other, one) == [ChannelData(second, memoryview(b"to the one"))]
    one.close(first)
    assert pump(0.0, one, other) == [ChannelClosed(first)]
    assert first not in one
    assert first not in other


def test_data_written_before_a_close_arrives_before_it() -> None:
    one, other = pair()
    channel = opened(one, other)
    fill(one, channel)
    one.close(channel)
    assert one.room(channel) == 0
    *data, end = pump(0.0, one, other)
    assert end == ChannelClosed(channel)
    assert all(isinstance(each, ChannelData) for each in data)


def test_closes_that_cross_each_other_end_the_channel_silently() -> None:
    one, other = pair()
    channel = opened(one, other)
    fill(one, channel)
    one.close(channel)
    other.close(channel)
    assert channel in one
    assert pump(0.0, other, one) == []
    assert channel not in one
    assert pump(0.0, one, other) == []


def test_a_paused_reader_stops_only_its_own_channel() -> None:
    one, other = pair()
    slow, quick = opened(one, other), opened(one, other)
    came = 0
    for _ in range(1_000):
        fill(one, slow)
        for event in pump(0.0, one, other):
            assert isinstance(event, ChannelData)
            came += len(event.data)
        pump(0.0, other, one)
    assert came == CREDIT_BYTES
    one.write(quick, b"passes")
    assert pump(0.0, one, other) == [ChannelData(quick, memoryview(b"passes"))]
    other.taken(slow, came)
    pump(0.0, other, one)
    assert one.room(slow) > 0


def test_a_small_message_overtakes_bulk_data_on_other_channels() -> None:
    one, other = pair()
    bulk = [opened(one, other) for _ in range(4)]
    small = opened(one, other)
    for channel in bulk:
        fill(one, channel)
    for _ in range(len(bulk)):
        one.next_frame(0.0)
    one.write(small, b"probe")
    frame = one.next_frame(0.0)
    assert frame is not None
    assert other.receive(0.0, frame) == ChannelData(small, memoryview(b"probe"))


def test_busy_channels_take_turns() -> None:
    one, other = pair()
    channels = [opened(one, other) for _ in range(3)]
    shares = dict.fromkeys(channels, 0)
    for _ in range(60):
        for channel in channels:
            fill(one, channel)
        frame = one.next_frame(0.0)
        assert frame is not None
        event = other.receive(0.0, frame)
        assert isinstance(event, ChannelData)
        shares[event.channel] += len(event.data)
        other.taken(event.channel, len(event.data))
        pump(0.0, other, one)
    assert max(shares.values()) - min(shares.values()) <= DATA_BYTES_MAX


# --- the path ------------------------------------------------------------------------------------------


def carried(rate: float, trip: float, seconds: float) -> tuple[float, float]:
    """Send bulk data over a path with this rate (bytes a second) and an unbounded queue. Return, for the
    second half of the time, the bytes a second that arrived and the longest queueing delay in addition to
    half a round trip.
    """
    one, other = pair()
    channel = one.open()
    wire: deque[tuple[float, bytes]] = deque()
    back: deque[tuple[float, bytes]] = deque()
    free_at, got, waited = 0.0, 0, 0.0
    for tick in count():
        now = tick * 1e-3
        if now > seconds:
            return got / (seconds / 2), waited
        if channel in one and one.room(channel):
            fill(one, channel)
        while (frame := one.next_frame(now)) is not None:
            free_at = max(free_at, now) + len(frame) / rate
            wire.append((free_at + trip / 2, frame))
            if now > seconds / 2:
                waited = max(waited, free_at - now)
        while wire and wire[0][0] <= now:
            event = other.receive(now, wire.popleft()[1])
            if isinstance(event, ChannelData):
                got += len(event.data) if now > seconds / 2 else 0
                other.taken(channel, len(event.data))
        while (frame := other.next_frame(now)) is not None:
            back.append((now + trip / 2, frame))
        while back and back[0][0] <= now:
            one.receive(now, back.popleft()[1])
        one.tick(now)
    raise AssertionError


@pytest.mark.parametrize(("rate", "trip"), [(12.5e6, 0.002), (12.5e6, 0.1), (1.25e6, 0.04)])
def test_a_path_is_fully_used_while_its_queue_stays_short(rate: float, trip: float) -> None:
    reached, waited = carried(rate, trip, 3.0)
    assert reached >= 0.85 * rate
    assert waited <= max(2 * QUEUE_SECONDS, 1.3 * WINDOW_BYTES_MIN / rate)


def test_a_silent_path_with_open_channels_is_found_dead_sooner() -> None:
    for has_channel, seconds in ((True, PATHS.ping_seconds), (False, PATHS.idle_ping_seconds)):
        one, other = pair()
        if has_channel:
            opened(one, other)
        assert one.deadline == seconds
        assert one.tick(seconds)
        assert one.deadline == seconds + PATHS.dead_seconds
        assert not one.tick(seconds + PATHS.dead_seconds)


def test_a_doubted_path_is_pinged_at_once_and_found_dead_sooner() -> None:
    one, other = pair()
    one.doubt(5.0)
    assert one.deadline == 5.0 + PATHS.doubted_seconds
    assert not one.is_silent(5.0)
    assert one.is_silent(5.0 + PATHS.silent_seconds)
    pump(5.5, one, other)
    pump(6.0, other, one)
    assert not one.is_silent(5.0 + PATHS.silent_seconds)
    assert one.tick(5.0 + PATHS.doubted_seconds)
    one.doubt(20.0)
    assert not one.tick(20.0 + PATHS.doubted_seconds)


def test_a_path_doubted_late_is_dead_at_the_next_check() -> None:
    one, other = pair()
    opened(one, other)
    assert one.tick(PATHS.ping_seconds)
    doubted = PATHS.ping_seconds + PATHS.doubted_seconds + PATHS.late_seconds + 0.6
    assert one.tick(doubted - 0.1)
    one.doubt(doubted)
    assert one.is_silent(doubted)
    assert not one.tick(doubted + 0.4)


def test_a_process_that_was_suspended_pings_before_a_doubt_counts() -> None:
    one, other = pair()
    opened(one, other)
    assert one.tick(PATHS.ping_seconds)
    woken = PATHS.ping_seconds + PATHS.doubted_seconds + PATHS.late_seconds + 0.6
    one.doubt(woken)
    assert one.tick(woken)
    assert one.deadline == woken + PATHS.doubted_seconds


def test_an_answered_ping_keeps_a_path_and_measures_its_round_trip() -> None:
    one, other = pair()
    assert one.tick(PATHS.idle_ping_seconds)
    pump(PATHS.idle_ping_seconds + 0.05, one, other)
    pump(PATHS.idle_ping_seconds + 0.1, other, one)
    assert one.round_trip_seconds == pytest.approx(0.1)
    assert one.deadline == 2 * PATHS.idle_ping_seconds


def test_a_process_that_was_suspended_pings_again() -> None:
    one, _ = pair()
    one.tick(PATHS.idle_ping_seconds)
    woken = PATHS.idle_ping_seconds + PATHS.dead_seconds + PATHS.late_seconds + 1
    assert one.tick(woken)
    assert one.deadline == woken + PATHS.dead_seconds


# --- a hostile other end ------------------------------------------------------------------------------


def frame(kind: Kind, *numbers: int) -> bytes:
    return bytes([kind]) + b"".join(number.to_bytes(4, "big") for number in numbers)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\xff",
        frame(Kind.OPEN),
        frame(Kind.OPEN, 1),
        frame(Kind.OPEN, 0),
        frame(Kind.DATA, 2) + b"x",
        frame(Kind.DATA, 1) + b"x",
        frame(Kind.CLOSE, 7),
        frame(Kind.CREDIT, 2, 1),
        frame(Kind.CREDIT, 2),
        frame(Kind.ACKNOWLEDGED, 0, 1),
        frame(Kind.PING, 1) + b"more",
        frame(Kind.OPEN, 2) + bytes(2 * DATA_BYTES_MAX),
    ],
)
def test_malformed_frames_end_the_path(said: bytes) -> None:
    one, _ = pair()
    with pytest.raises(RemoteProtocolError):
        one.receive(0.0, said)


def test_data_beyond_the_credit_or_credit_beyond_its_limit_ends_the_path() -> None:
    one, other = pair()
    channel = opened(one, other)
    piece = frame(Kind.DATA, channel) + bytes(DATA_BYTES_MAX)
    for _ in range(CREDIT_BYTES // DATA_BYTES_MAX):
        other.receive(0.0, piece)
    with pytest.raises(RemoteProtocolError):
        other.receive(0.0, piece)
    with pytest.raises(RemoteProtocolError):
        one.receive(0.0, frame(Kind.CREDIT, channel, 2**32 - 1))


def test_a_data_frame_without_any_byte_ends_the_path() -> None:
    one, other = pair()
    channel = opened(one, other)
    with pytest.raises(RemoteProtocolError):
        other.receive(0.0, frame(Kind.DATA, channel))


def test_channels_over_the_limit_are_closed_without_queueing_answers() -> None:
    one, other = pair()
    channels = [opened(other, one) for _ in range(CHANNELS_MAX)]
    with pytest.raises(LocalProtocolError):
        other.open()
    over = channels[-1] + 2
    one.receive(0.0, frame(Kind.OPEN, over))
    assert one.next_frame(0.0) == frame(Kind.CLOSE, over)

    def flood() -> None:
        for channel in range(over + 2, over + 100_000, 2):
            one.receive(0.0, frame(Kind.OPEN, channel))

    with pytest.raises(RemoteProtocolError):
        flood()
    assert all(size <= limit for size, limit in one.sizes.values())


def test_a_flood_of_pings_costs_a_single_answer() -> None:
    one, _ = pair()
    for number in range(10_000):
        one.receive(0.0, frame(Kind.PING, number))
    assert one.next_frame(0.0) == frame(Kind.PONG, 9_999)
    assert one.next_frame(0.0) is None


class TwoSides(RuleBasedStateMachine):
    """Both ends act as their users may while frames are in transit. The bytes that are read must equal the
    bytes that were written."""

    def __init__(self) -> None:
        super().__init__()
        self.sides = pair()
        self.wires: tuple[deque[bytes], deque[bytes]] = (deque(), deque())
        # Bytes that were written and not read yet, keyed by the number of the end that wrote them.
        self.written: tuple[dict[int, bytearray], dict[int, bytearray]] = ({}, {})
        self.untaken: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self.now = 0.0

    def channels(self, side: int) -> list[int]:
        return [channel for channel in sorted(self.written[side]) if channel in self.sides[side]]

    @rule(side=st.integers(0, 1))
    def open(self, side: int) -> None:
        if len(self.sides[side]) < 8:
            channel = self.sides[side].open()
            for each in (0, 1):
                self.written[each].setdefault(channel, bytearray())

    @precondition(lambda self: self.written[0])
    @rule(side=st.integers(0, 1), data=st.data(), size=st.integers(1, 100_000))
    def write(self, side: int, data: st.DataObject, size: int) -> None:
        channels = self.channels(side)
        if channels:
            channel = data.draw(st.sampled_from(channels))
            text = bytes([size % 251]) * min(size, self.sides[side].room(channel))
            self.sides[side].write(channel, text)
            self.written[side][channel] += text

    @precondition(lambda self: self.written[0])
    @rule(side=st.integers(0, 1), data=st.data())
    def close(self, side: int, data: st.DataObject) -> None:
        channels = self.channels(side)
        if channels:
            self.sides[side].close(data.draw(st.sampled_from(channels)))

    @rule(side=st.integers(0, 1), most=st.integers(1, 40))
    def send(self, side: int, most: int) -> None:
        for _ in range(most):
            frame = self.sides[side].next_frame(self.now)
            if frame is None:
                break
            self.wires[side].append(frame)

    @rule(side=st.integers(0, 1), most=st.integers(1, 40))
    def arrive(self, side: int, most: int) -> None:
        other = 1 - side
        for _ in range(min(most, len(self.wires[side]))):
            event = self.sides[other].receive(self.now, self.wires[side].popleft())
            if isinstance(event, ChannelData):
                sent = self.written[side][event.channel]
                assert sent[: len(event.data)] == event.data
                del sent[: len(event.data)]
                taken = self.untaken[other]
                taken[event.channel] = taken.get(event.channel, 0) + len(event.data)

    @rule(side=st.integers(0, 1))
    def take(self, side: int) -> None:
        for channel, size in self.untaken[side].items():
            self.sides[side].taken(channel, size)
        self.untaken[side].clear()

    @rule(seconds=st.floats(0.0, 1.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for side in self.sides:
            side.tick(self.now)

    @invariant()
    def nothing_grows(self) -> None:
        for side in self.sides:
            assert all(size <= limit for size, limit in side.sizes.values())

    def teardown(self) -> None:
        """A reader that keeps reading gets all data that was written on channels that neither end closed."""
        for _ in range(400):
            for side in (0, 1):
                self.send(side, 1_000)
                self.arrive(side, 1_000)
                self.take(1 - side)
        for side in (0, 1):
            for channel, left in self.written[side].items():
                if channel in self.sides[0] and channel in self.sides[1]:
                    assert not left


TestTwoSides = TwoSides.TestCase
TestTwoSides.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
