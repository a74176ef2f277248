"""A hostile peer's knowledge of a live swarm: real messages, and their values by field name.

A made-up hash is refused early, but a real one is not. So the peer makes its messages from values that it
received.
"""

from collections import defaultdict, deque
from collections.abc import Sequence
from random import Random

import msgspec

from crypto.facts import Fact

KEPT_MAX = 24
"""How many of the latest values are kept for each name, and how many messages for each kind."""
ITEMS_MAX = 4
"""How many items of a long list are learnt; the others are like them."""
BYTES_MAX = 256
"""Longer values identify nothing, so they are not learnt."""

Plain = int | float | str | bytes
"""Types whose values have no parts."""


class Known:
    """Filled by `learn`. Lookups return None if no such value has been received yet."""

    def __init__(self) -> None:
        self._specimens: dict[type, deque[msgspec.Struct]] = defaultdict(lambda: deque(maxlen=KEPT_MAX))
        self._named: dict[tuple[type, str], deque[Plain]] = defaultdict(lambda: deque(maxlen=KEPT_MAX))
        self._sized: dict[int, deque[bytes]] = defaultdict(lambda: deque(maxlen=2 * KEPT_MAX))

    def learn(self, value: object, name: str = "") -> None:
        """Learn a received message or value, and all its parts."""
        match value:
            case bool() | None:
                return
            case int() | float() | str():
                self._note(value, name)
            case bytes() if len(value) <= BYTES_MAX:
                self._note(value, name)
                if value not in (held := self._sized[len(value)]):
                    held.append(value)
            case msgspec.Struct():
                self._specimens[type(value)].append(value)
                for field in value.__struct_fields__:
                    self.learn(getattr(value, field), field)
            case tuple() | list():
                for item in value[:ITEMS_MAX]:
                    self.learn(item, name)

    def _note(self, value: Plain, name: str) -> None:
        if value not in (held := self._named[type(value), name]):
            held.append(value)

    def specimen(self, kind: type, rng: Random) -> msgspec.Struct | None:
        """Return a received message of this kind."""
        held = self._specimens.get(kind)
        return rng.choice(held) if held else None

    def fact(self, rng: Random) -> Fact | None:
        """Return a received fact with its signature."""
        found = self.specimen(Fact, rng)
        assert found is None or isinstance(found, Fact)
        return found

    def named(self, kind: type, name: str, rng: Random) -> Plain | None:
        """Return a received value of this type in a field of this name."""
        held = self._named.get((kind, name))
        return rng.choice(held) if held else None

    def of_length(self, length: int, rng: Random) -> bytes | None:
        """Return any value of this length, such as a peer or a hash."""
        held = self._sized.get(length)
        return rng.choice(held) if held else None

    def texts(self) -> Sequence[str]:
        """Return every received text."""
        return [
            value
            for (kind, _), held in self._named.items()
            if kind is str
            for value in held
            if isinstance(value, str)
        ]
