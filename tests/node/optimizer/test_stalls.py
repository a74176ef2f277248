"""One stall of an honest member, as of a machine that swaps or sleeps, costs little more than its length.

On real nodes; `tests/node/averaging/test_stalled_members.py` covers other points of a round, in virtual time.
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
"""Longer than the time-out for a silent member."""
APART_SECONDS = 15.0
"""Seconds from the stall on, for the next three rounds. It used to be 30 to 90 s."""


def two_parts(seed: int = 0) -> torch.nn.Module:
    """A model of more than 4,096 numbers, so that both members reduce a part."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 1_024), torch.nn.Tanh(), torch.nn.Linear(1_024, 2))


@pytest.mark.skipif(not SLOW, reason="PEERLOOM_LATE_MEMBERS=1")
def test_a_stall_of_one_member_costs_little_more_than_its_length(
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
        for number in range(2):  # the first one trains when the second asks for its state
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
