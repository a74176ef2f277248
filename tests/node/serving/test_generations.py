"""A node keeps figures about each of its answers."""

from types import SimpleNamespace
from typing import Any

import pytest

from crypto.identity import PeerId
from node.serving.generations import Generation, Generations
from partition.serve.door import Event, RouteTaken, Sampled

ME, ONE, OTHER = (PeerId(bytes([number]) * 32) for number in range(3))
FIRST = RouteTaken(1, (ONE,), tokens=100, shared=90)
MOVED = RouteTaken(1, (OTHER,), tokens=100, lost="its node is silent", shared=0)


@pytest.mark.parametrize(
    ("events", "shared"),
    [
        ([FIRST], 90),
        ([FIRST, MOVED], 0),
        ([MOVED, FIRST], 90),
        ([FIRST, Sampled(1, 100, 7, -0.5), MOVED], 90),
    ],
)
def test_shared_tokens_are_counted_on_the_route_of_the_first_token(events: list[Event], shared: int) -> None:
    clock = SimpleNamespace(monotonic=lambda: 1.0, wall=lambda: 1.0)
    seams = SimpleNamespace(entropy=bytes, clock=clock)
    owner: Any = SimpleNamespace(seams=seams, publish=lambda _event: None)
    service: Any = SimpleNamespace(text="service", manifest=SimpleNamespace(name="words"))
    generations = Generations(owner, ME)
    generations._going[1] = made = Generation(service, 0.0, 100)
    generations.door.events = list(events)
    generations.act()
    assert made.shared == shared
