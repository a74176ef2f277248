"""If an honest member stalls once, because its machine swaps or sleeps, the delay is little longer than the
stall.

Real nodes; `tests/node/averaging/test_stalled_members.py` covers other points of a round in virtual time.
"""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from node.averaging.participation import Participation
from tests.node.optimizer import test_liars
from tests.node.optimizer.test_liars import SLOW, Trainer
from tests.node.optimizer.test_wrapper import open_nodes, until

torch.set_num_threads(1)
STALL_SECONDS = 4.5
"""Length of the stall: longer than the time-out for a silent member."""
APART_SECONDS = 15.0
"""Most seconds from the stall until the next three rounds are over. It was once 30 to 90 s."""


def two_parts(seed: int = 0) -> torch.nn.Module:
    """Return a model of more than 4,096 values, so that both members reduce a part of it."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 1_024), torch.nn.Tanh(), torch.nn.Linear(1_024, 2))


@pytest.mark.skipif(not SLOW, reason="PEERLOOM_LATE_MEMBERS=1")
def test_one_stalled_member_delays_others_little_longer_than_its_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_liars, "model_of", two_parts)
    original = Participation._attempt
    seen: list[Any] = []
    stalled: list[Any] = []

    async def late(self: Participation, *arguments: Any) -> Any:
        seen.append(self.peer)
        if not stalled and self.peer != seen[0] and len(seen) > 6:
            stalled.append(self.peer)
            await trio.sleep(STALL_SECONDS)
        return await original(self, *arguments)

    monkeypatch.setattr(Participation, "_attempt", late)
    with ExitStack() as stack:
        nodes = open_nodes(stack, tmp_path, 2)
        options = {"local_steps": 4, "window_seconds": 5.0}
        members = []
        for number in range(2):  # the first member already trains when the second asks for its state
            members.append(Trainer(nodes[number], number, "stall", options))
            members[-1].begin()
            stack.callback(members[-1].close)
        for member in members:
            stack.callback(member.end)
        until(lambda: stalled)
        begun = time.monotonic()
        before = [member.optimizer.stats.rounds for member in members]
        until(lambda: all(m.optimizer.stats.rounds > b + 3 for m, b in zip(members, before, strict=True)))
        assert time.monotonic() - begun < APART_SECONDS
