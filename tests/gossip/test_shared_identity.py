"""If two processes have one key, because a data folder was copied, one of them stops. Some similar cases are
not taken for copies.
"""

from functools import partial

import pytest

from gossip.member import Status
from gossip.messages import Ack, Compare, Ping
from gossip.other_lives import LIVES_MAX
from gossip.settings import SwimSettings
from tests.gossip.copies import KEY, STARTED, Swarm

SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 5.0
LISTED_SECONDS_MAX = 3.0
"""Seconds from the end of a copy until all members list the original with its name and address."""
EARLIER, LATER = STARTED - 60_000, STARTED + 60_000
SEEDS = range(50)


def start_original(seed: int = 1, *, others: int = 2, settings: SwimSettings | None = None) -> Swarm:
    """Return a swarm in which the original has been running for a while."""
    swarm = Swarm(seed, settings or SwimSettings.lan(), others=others)
    swarm.run(3.0)
    swarm.start("original", KEY, "1")
    swarm.run(swarm.rng.uniform(3.0, 20.0))
    return swarm


def is_right(swarm: Swarm) -> bool:
    """Return whether all running members list each other as alive, and list only the original under its
    key."""
    running = list(swarm.running.values())
    return all(
        machine.listed(other.peer) == (other.name, Status.ALIVE) for machine in running for other in running
    )


def run_until_stopped(swarm: Swarm, name: str) -> float:
    seconds = swarm.run_until(lambda: name not in swarm.running, SECONDS_MAX)
    assert seconds is not None
    return seconds


@pytest.mark.parametrize(
    ("first", "second", "goes"),
    [
        ((EARLIER, b"aaaaaa"), (LATER, b"aaaaaa"), "copy"),
        ((LATER, b"aaaaaa"), (EARLIER, b"aaaaaa"), "original"),
        ((EARLIER, b"aaaaaa"), (EARLIER, b"bbbbbb"), "copy"),
    ],
    ids=["copy-began-later", "clock-of-copy-behind", "at-the-same-time"],
)
def test_the_younger_of_two_processes_with_one_key_stops(
    first: tuple[int, bytes], second: tuple[int, bytes], goes: str
) -> None:
    swarm = Swarm(1, SwimSettings.lan())
    swarm.start("original", KEY, "1", started=first[0], instance=first[1])
    swarm.run(5.0)
    swarm.start("copy", KEY, "1", started=second[0], instance=second[1])
    assert run_until_stopped(swarm, goes) < STOP_SECONDS_MAX
    swarm.run(LISTED_SECONDS_MAX)
    assert len(swarm.running) == 3
    assert is_right(swarm)


@pytest.mark.parametrize("others", [2, 8])
def test_each_of_several_copies_stops_soon_and_nobody_is_lost(others: int) -> None:
    slow = []
    for seed in SEEDS if others == 2 else SEEDS[:10]:
        swarm = start_original(seed, others=others)
        for number in range(3):
            name = f"copy {number}"
            through = swarm.rng.choice([("1",), ("2",), ("1", "2")])
            copy = swarm.start(name, KEY, *through)
            stopped = run_until_stopped(swarm, name)
            listed = swarm.run_until(partial(is_right, swarm), SECONDS_MAX)
            if stopped > STOP_SECONDS_MAX or listed is None or listed > LISTED_SECONDS_MAX or copy.lost():
                slow.append((seed, number, stopped, listed))
            swarm.run(swarm.rng.choice([0.0, 0.5, 10.0]))
        assert "original" in swarm.running
        assert [machine.name for machine in swarm.running.values() if machine.lost()] == [], seed
    assert slow == []


def test_more_copies_than_a_member_remembers_stop_one_by_one() -> None:
    swarm = start_original()
    for number in range(LIVES_MAX + 4):
        swarm.start(f"copy {number}", KEY, "1")
        assert run_until_stopped(swarm, f"copy {number}") < STOP_SECONDS_MAX
        swarm.run(1.0)
    swarm.run(LISTED_SECONDS_MAX)
    assert is_right(swarm)


@pytest.mark.parametrize("again", [LATER, EARLIER - 1], ids=["later", "clock-set-back"])
def test_a_node_does_not_take_its_own_earlier_process_for_a_copy(again: int) -> None:
    swarm = Swarm(1, SwimSettings.lan())
    swarm.start("before", KEY, "1", started=EARLIER)
    swarm.run(5.0)
    swarm.stop("before")
    machine = swarm.start("machine", KEY, "1", started=again)
    swarm.run(SECONDS_MAX)
    assert machine.rivals() == []
    assert is_right(swarm)


def test_a_restart_or_a_copy_adds_no_lasting_traffic() -> None:
    swarm = start_original()
    swarm.start("copy", KEY, "1")
    run_until_stopped(swarm, "copy")
    swarm.run(SECONDS_MAX)
    swarm.sent.clear()
    swarm.run(SECONDS_MAX)
    assert {type(message) for message in swarm.sent} == {Ping, Ack, Compare}
    assert not any(message.facts for message in swarm.sent)
