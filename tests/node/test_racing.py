"""Dialling several addresses of one peer, in virtual time: an address that swallows packets delays no other
address."""

from collections.abc import Mapping

import pytest
import trio
from trio.testing import MockClock

from crypto.contact import Address, make_address
from node.errors import Unreachable
from node.transport.racing import ATTEMPT_DELAY_SECONDS, race

Outcome = tuple[float, str]
"""Seconds until the attempt at an address ends, and the failure, which is empty if the attempt succeeds."""
CONNECT_SECONDS = 5.0


def address(number: int) -> Address:
    return make_address("203.0.113.1", 9_000 + number)


def run(outcomes: Mapping[int, Outcome], **options: float) -> tuple[list[int] | str, float, list[float]]:
    """Return the winner or the failure, when the race ended, and when each attempt started."""
    begun: list[float] = []

    async def attempt(tried: Address) -> int:
        begun.append(trio.current_time())
        seconds, reason = outcomes[tried.port - 9_000]
        await trio.sleep(seconds)
        if reason:
            raise Unreachable(reason, f"{tried.short} failed")
        return tried.port - 9_000

    async def main() -> tuple[list[int] | str, float]:
        try:
            return await race(
                [address(number) for number in outcomes], attempt, **options
            ), trio.current_time()
        except Unreachable as error:
            return error.reason, trio.current_time()

    clock = MockClock(autojump_threshold=0)
    began = clock.current_time()
    found, ended = trio.run(main, clock=clock)
    return found, ended - began, [each - began for each in begun]


def test_an_address_that_swallows_packets_delays_by_a_fraction_of_a_second() -> None:
    silent = (CONNECT_SECONDS, "timeout")
    found, seconds, begun = run({0: silent, 1: silent, 2: silent, 3: (0.01, "")})
    assert found == [3]
    assert seconds == pytest.approx(3 * ATTEMPT_DELAY_SECONDS + 0.01)
    assert begun == pytest.approx([number * ATTEMPT_DELAY_SECONDS for number in range(4)])


def test_a_refusal_makes_the_next_attempt_start_sooner() -> None:
    found, seconds, _ = run({0: (0.01, "refused"), 1: (0.01, "refused"), 2: (0.01, "")})
    assert found == [2]
    assert seconds == pytest.approx(0.03)


def test_no_second_address_is_tried_if_the_first_answers_quickly() -> None:
    found, _, begun = run({0: (0.2, ""), 1: (0.01, "")})
    assert found == [0]
    assert len(begun) == 1


def test_a_known_good_address_gets_more_time_before_others_are_tried() -> None:
    found, _, begun = run({0: (1.5, ""), 1: (0.01, "")}, first_delay_seconds=2.0)
    assert found == [0]
    assert len(begun) == 1


def test_a_failed_race_tried_every_address_and_raises_the_clearest_error() -> None:
    outcomes: dict[int, Outcome] = dict.fromkeys(range(8), (CONNECT_SECONDS, "timeout"))
    found, seconds, begun = run(outcomes | {8: (0.0, "wrong key")})
    assert found == "wrong key"
    assert max(begun) < 6.5
    assert seconds < max(begun) + CONNECT_SECONDS + 0.1


def test_two_simultaneous_successes_are_both_returned() -> None:
    found, _, _ = run({0: (ATTEMPT_DELAY_SECONDS, ""), 1: (0.0, "")})
    assert isinstance(found, list)
    assert sorted(found) in ([0], [1], [0, 1])


def test_a_race_without_addresses_fails_with_a_reason() -> None:
    assert run({})[0] == "unknown"
