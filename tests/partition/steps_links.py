"""Possible next events in the world of the step machines: links with messages on them, and a pool of all
events."""

from collections import deque
from dataclasses import dataclass
from random import Random
from typing import Any

from tests.partition.steps_machine import Key, Machine


class Link:
    """Messages in transit, oldest first. While `is_broken` they wait."""

    def __init__(self, sender: Machine, receiver: Machine, is_slow: bool) -> None:
        self.sender = sender
        self.receiver = receiver
        self.is_slow = is_slow
        self.is_broken = False
        self.queue: deque[Any] = deque()


@dataclass(frozen=True)
class Learning:
    """The event that this machine learns of the next plan."""

    machine: Machine


@dataclass(frozen=True)
class Taking:
    """The event that a reduction ends at this member."""

    key: Key
    machine: Machine


class Pool:
    """The possible next events, each once and all with the same probability."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._list: list[Any] = []
        self._set: set[Any] = set()

    def __bool__(self) -> bool:
        return bool(self._list)

    def add(self, token: Any) -> None:
        if token not in self._set:
            self._set.add(token)
            self._list.append(token)

    def take(self) -> Any:
        place = int(self._rng.random() * len(self._list))
        token = self._list[place]
        self._list[place] = self._list[-1]
        self._list.pop()
        self._set.discard(token)
        return token
