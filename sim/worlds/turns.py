"""Actions of one simulated peer. A dead peer does nothing, and a frozen one acts when it thaws."""

from collections.abc import Callable, Sequence
from typing import Any

from crypto.identity import PeerId
from partition.run.provider import StageProvider
from partition.steps.frames import OpenedFrame
from sim.network.instants import instant
from sim.worlds.run_context import Setting
from sim.worlds.run_messages import MESSAGE_BYTES, STATE_BYTES, FetchCopy, FetchState, Question
from sim.worlds.sim_stage import FRAME_BYTES
from sim.worlds.streams import Answer


class LifeTurns:
    """The actions of a peer between a start and a stop. `settle` runs after each action."""

    def __init__(self, setting: Setting, me: PeerId) -> None:
        self.me = me
        self.setting = setting
        self._is_alive = True
        self.provider: StageProvider = setting.provider(me)

    @property
    def now(self) -> float:
        """The time in virtual seconds."""
        return self.setting.ground.now

    def settle(self) -> None:
        """Do everything that follows from an action."""

    def turn(self, action: Callable[[], None]) -> None:
        """Act as this peer, now or at the thaw, and then settle."""
        ground = self.setting.ground
        if not self._is_alive:
            return
        thaws = ground.thaws(self.me)
        if thaws > ground.now:
            ground.at(thaws, lambda: self.turn(action))
            return
        action()
        self.settle()

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Act after this many seconds, if the peer has not stopped by then."""
        ground = self.setting.ground
        ground.at(instant(ground.now + seconds), lambda: self.turn(action))

    def stop(self) -> None:
        """End the actions of this life."""
        self._is_alive = False

    def send(self, peer: PeerId, message: Any) -> None:
        """Send a message on the stream to `peer`."""
        size = FRAME_BYTES if isinstance(message, OpenedFrame) else MESSAGE_BYTES
        self.setting.streams.send(self.me, peer, message, size)

    def send_all(self, sends: Sequence[tuple[PeerId, Any]]) -> None:
        for peer, message in sends:
            self.send(peer, message)

    def ask(self, peer: PeerId, question: Question, seconds: float, done: Answer) -> None:
        """Send a request. `done` receives the answer, or None if there is none."""
        size = STATE_BYTES if isinstance(question, FetchState | FetchCopy) else MESSAGE_BYTES

        def put(answer: Answer) -> None:
            self.setting.put(self.me, peer, question, answer)

        self.setting.streams.ask(
            self.me, peer, size, seconds, put, lambda reply: self.turn(lambda: done(reply))
        )
