"""Ordered streams between the members of one run in a world of cores, and requests with answers.

Opening, breaking and redialling of streams are modelled, but not their bytes. An open stream loses nothing.
It breaks when its receiver stops or a split separates the two peers. Messages in flight are then lost, and
later ones wait. The sender redials until the stream opens, and is then notified. A request fails immediately
when the path breaks.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from crypto.identity import PeerId
from sim.seeds import draw

RETRY_SECONDS_MAX = 2.0
"""Maximum pause between two dial attempts, as in a node's links."""
UNREACHABLE_SECONDS = 0.5
"""How long it takes until a peer learns that its request cannot reach the other peer."""
DIAL_TRIPS = 3
"""Number of one-way trips before the first message of a new stream: TCP, then Noise."""

Deliver = Callable[[PeerId, PeerId, Any], None]
Answer = Callable[[Any], None]
"""Receives the answer; None if there is none."""


class StreamEnvironment(Protocol):
    """The environment of streams: the world and its network."""

    @property
    def now(self) -> float: ...
    def at(self, when: float, action: Callable[[], None]) -> None:
        """Call `action` at that instant; calls of one instant are made in the order of scheduling."""

    def connected(self, one: PeerId, other: PeerId) -> bool:
        """Return whether both peers run and reach each other."""

    def carry(self, sender: PeerId, receiver: PeerId, size_bytes: int, land: Callable[[float], None]) -> None:
        """Send `size_bytes` now; `land` is called with their arrival time, before that instant."""

    def thaws(self, peer: PeerId) -> float:
        """Return the time at which a frozen peer thaws; a past time for others."""


@dataclass(eq=False)
class _Stream:
    sender: PeerId
    receiver: PeerId
    is_open: bool = False
    was_open: bool = False
    dials: int = 0
    """Number of dials so far; only the latest one counts."""
    broken_at: float = 0.0
    on_way: deque[Any] = field(default_factory=deque)
    waiting: deque[tuple[Any, int]] = field(default_factory=deque)
    life: int = 0
    """Number of breaks so far; messages from before the latest break do not arrive."""


@dataclass(eq=False)
class _Question:
    asker: PeerId
    peer: PeerId
    done: Answer


class Streams:
    """The streams of one run. `deliver(sender, receiver, message)` takes messages; `reconnected(sender,
    receiver)` is called when a stream is open again."""

    def __init__(
        self,
        ground: StreamEnvironment,
        seed: int,
        deliver: Deliver,
        reconnected: Callable[[PeerId, PeerId], None],
    ) -> None:
        self._ground = ground
        self._seed = seed
        self._deliver = deliver
        self._reconnected = reconnected
        self._streams: dict[tuple[PeerId, PeerId], _Stream] = {}
        self._questions: dict[_Question, None] = {}
        self._dials = 0

    def send(self, sender: PeerId, receiver: PeerId, message: Any, size_bytes: int) -> None:
        """Send a message. A message to the sender itself does not use the network."""
        stream = self._streams.get((sender, receiver))
        if stream is None:
            stream = self._streams[sender, receiver] = _Stream(sender, receiver)
            stream.is_open = stream.was_open = sender == receiver
            if not stream.is_open:
                self._dial(stream, 0.0)
        if stream.is_open:
            self._carry(stream, message, size_bytes)
        else:
            stream.waiting.append((message, size_bytes))

    def ask(
        self, asker: PeerId, peer: PeerId, size_bytes: int, seconds: float, put: Callable[[Answer], None],
        done: Answer,
    ) -> None:  # fmt: skip
        """Send a request on a stream of its own. `put` is called at the remote end with a function to answer,
        now or later. `done` receives the answer, or None if there is none within `seconds` or the path
        breaks."""
        ground, question = self._ground, _Question(asker, peer, done)
        self._questions[question] = None
        if not ground.connected(asker, peer):
            ground.at(ground.now + UNREACHABLE_SECONDS, lambda: self._settle(question, None))
            return

        def answer(reply: Any) -> None:
            if question in self._questions:
                self._carry_to(peer, asker, size_bytes, lambda: self._settle(question, reply))

        def arrive() -> None:
            if question in self._questions:
                self._when_awake(peer, lambda: put(answer))

        self._carry_to(asker, peer, size_bytes, arrive)
        ground.at(ground.now + seconds, lambda: self._settle(question, None))

    def stopped(self, peer: PeerId) -> None:
        """Forget a stopped peer and its unsent messages."""
        for key in [key for key in self._streams if key[0] == peer]:
            del self._streams[key]
        for question in [question for question in self._questions if question.asker == peer]:
            del self._questions[question]
        self.changed()

    def changed(self) -> None:
        """Break and redial streams after the network, or the set of running peers, changed."""
        for stream in list(self._streams.values()):
            stands = stream.sender == stream.receiver or self._ground.connected(
                stream.sender, stream.receiver
            )
            if stands and not stream.is_open:
                self._dial(stream, self._pause(stream))
            elif not stands and stream.is_open:
                self._break(stream)
        for question in list(self._questions):
            if not self._ground.connected(question.asker, question.peer):
                self._ground.at(self._ground.now, partial(self._settle, question, None))

    # One stream

    def _break(self, stream: _Stream) -> None:
        stream.is_open = False
        stream.broken_at = self._ground.now
        stream.on_way.clear()
        stream.life += 1

    def _pause(self, stream: _Stream) -> float:
        """Return the pause before the next attempt; pauses grow."""
        self._dials += 1
        share = draw(self._seed, "dial", stream.sender, stream.receiver, self._dials)[0] / 256
        return share * min(RETRY_SECONDS_MAX, max(0.05, self._ground.now - stream.broken_at))

    def _dial(self, stream: _Stream, pause: float) -> None:
        stream.dials += 1
        number = stream.dials

        def trip(left: int) -> None:
            ends = (stream.sender, stream.receiver) if left % 2 else (stream.receiver, stream.sender)
            if not left:
                self._open(stream, number)
            elif self._is_current(stream, number):
                self._carry_to(*ends, 0, lambda: trip(left - 1))

        self._ground.at(self._ground.now + pause, lambda: trip(DIAL_TRIPS))

    def _is_current(self, stream: _Stream, number: int) -> bool:
        """Return whether a dial is the latest one and may succeed; a failed one is repeated after a
        change."""
        is_held = self._streams.get((stream.sender, stream.receiver)) is stream
        may_open = is_held and not stream.is_open and stream.dials == number
        return may_open and self._ground.connected(stream.sender, stream.receiver)

    def _open(self, stream: _Stream, number: int) -> None:
        if not self._is_current(stream, number):
            return
        stream.is_open = True
        was_open, stream.was_open = stream.was_open, True
        waiting, stream.waiting = stream.waiting, deque()
        for message, size_bytes in waiting:
            self._carry(stream, message, size_bytes)
        if was_open:
            self._when_awake(stream.sender, lambda: self._reconnected(stream.sender, stream.receiver))

    def _carry(self, stream: _Stream, message: Any, size_bytes: int) -> None:
        stream.on_way.append(message)
        life = stream.life
        self._carry_to(stream.sender, stream.receiver, size_bytes, lambda: self._arrive(stream, life))

    def _carry_to(
        self, sender: PeerId, receiver: PeerId, size_bytes: int, action: Callable[[], None]
    ) -> None:
        """Call `action` when this many bytes, sent now, have arrived; immediately if a peer sends to
        itself."""
        ground = self._ground
        if sender == receiver:
            ground.at(ground.now, action)
        else:
            ground.carry(sender, receiver, size_bytes, lambda due: ground.at(due, action))

    def _arrive(self, stream: _Stream, life: int) -> None:
        if stream.life != life or self._streams.get((stream.sender, stream.receiver)) is not stream:
            return
        thaws = self._ground.thaws(stream.receiver)
        if thaws > self._ground.now:
            self._ground.at(thaws, lambda: self._arrive(stream, life))
            return
        self._deliver(stream.sender, stream.receiver, stream.on_way.popleft())

    # Requests

    def _settle(self, question: _Question, reply: Any) -> None:
        def tell() -> None:
            if question in self._questions:
                del self._questions[question]
                question.done(reply)

        if question in self._questions:
            self._when_awake(question.asker, tell)

    def _when_awake(self, peer: PeerId, action: Callable[[], None]) -> None:
        thaws = self._ground.thaws(peer)
        if thaws > self._ground.now:
            self._ground.at(thaws, action)
        else:
            action()
