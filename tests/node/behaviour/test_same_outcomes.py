"""Any sequence of actions on a stream has the same outcomes on both networks, the real and the simulated
one."""

import itertools

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import MockClock

from node.errors import StreamClosed, StreamEnded
from node.seams import Stream
from tests.node.behaviour.worlds import RealWorld, SimulatedWorld, World, conversation

DEEDS = st.sampled_from(["send", "send", "receive", "receive", "say the end", "close"])
ACTIONS = st.lists(st.tuples(st.sampled_from([0, 1]), DEEDS), max_size=9)
STEP_SECONDS, PATIENCE_SECONDS = 0.2, 0.15
"""Seconds per action, and seconds to wait for its outcome. A step takes longer than a message on its way; all
steps together are shorter than the time-out of a closed stream."""


async def act(stream: Stream, action: str, number: int) -> str:
    """Perform the action and describe its outcome."""
    try:
        with trio.move_on_after(PATIENCE_SECONDS):
            if action == "send":
                await stream.send(f"message {number}".encode())
            elif action == "receive":
                return (await stream.receive()).decode()
            elif action == "say the end":
                await stream.send_eof()
            else:
                await stream.aclose()
            return "done"
    except StreamEnded:
        return "ended"
    except StreamClosed:
        return "closed"
    return "nothing came"


async def outcomes(world: World, actions: list[tuple[int, str]]) -> list[str]:
    """Return the outcome of each action; an action is (end of the stream, what it does)."""
    far: list[Stream] = []
    done = trio.Event()

    async def lend(stream: Stream) -> None:
        far.append(stream)
        await done.wait()

    found = []
    async with conversation(world, lend) as (stream, _, _):
        await trio.sleep(STEP_SECONDS)
        sides, has_closed, has_heard = (stream, *far), [False, False], [False, False]
        for number, (side, action) in enumerate(actions):
            outcome = await act(sides[side], action, number)
            if action == "receive" and outcome == "ended" and has_closed[not side]:
                has_heard[side] = True
            speaks = action in ("send", "say the end")
            if speaks and has_closed[not side] and not has_heard[side] and not has_closed[side]:
                # No network promises when a peer that is not reading learns that the other end is gone.
                outcome = "may be heard"
            has_closed[side] = has_closed[side] or action == "close"
            found.append(outcome)
            await trio.sleep(STEP_SECONDS - PATIENCE_SECONDS)
        done.set()
    return found


def play(kind: type[World], actions: list[tuple[int, str]]) -> list[str]:
    return trio.run(outcomes, kind(), actions, clock=MockClock(autojump_threshold=kind.pause_seconds))


@settings(max_examples=15)
@given(ACTIONS)
def test_every_order_of_actions_has_equal_outcomes_on_both_networks(actions: list[tuple[int, str]]) -> None:
    assert play(RealWorld, actions) == play(SimulatedWorld, actions)


@pytest.mark.parametrize("first", ["say the end", "close"])
def test_every_pair_of_actions_after_a_first_has_equal_outcomes(first: str) -> None:
    for pair in itertools.product(("send", "receive", "say the end", "close"), repeat=2):
        actions = [(0, "send"), (0, first), (1, pair[0]), (1, pair[1]), (1, "receive"), (0, "receive")]
        assert play(RealWorld, actions) == play(SimulatedWorld, actions), actions
