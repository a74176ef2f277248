"""Toy cores, as small as possible, to try the simulator on."""

import math
from random import Random
from typing import Any

import msgspec

from crypto.identity import PeerId
from node.services.driver import Sends


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=True):
    number: int


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=True):
    number: int


class Ponged(msgspec.Struct, frozen=True):
    """An event: the answer to ping `number` has arrived."""

    number: int
    peer: bytes


Message = Ping | Pong


class Pinger:
    """A core that pings a random peer of `others` every `period_seconds`, and answers pings."""

    def __init__(self, others: list[PeerId], rng: Random, *, now: float, period_seconds: float) -> None:
        self.events: list[Any] = []
        self.deadline = now + period_seconds if others else math.inf
        self.others = others
        self.received: list[tuple[float, PeerId, int]] = []
        self._rng = rng
        self._period_seconds = period_seconds
        self._number = 0

    def receive(self, now: float, sender: PeerId, message: Message) -> Sends:
        if isinstance(message, Ping):
            self.received.append((now, sender, message.number))
            return [(sender, Pong(message.number))]
        self.events.append(Ponged(message.number, sender))
        return []

    def wake(self, now: float) -> Sends:
        self.deadline = now + self._period_seconds
        self._number += 1
        return [(self._rng.choice(self.others), Ping(self._number))]
