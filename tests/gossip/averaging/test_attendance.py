"""A peer's record of the attendance of others, and how the record affects the next groups."""

from crypto.identity import PeerId
from gossip.averaging.attendance import (
    ABSENT_ROUNDS_MIN,
    BACKOFF_SECONDS_MAX,
    EXCUSE_SECONDS,
    LEFT_OUT_SECONDS_MIN,
    RECORDS_MAX,
    WITHDRAWALS_MAX,
    Attendance,
)
from gossip.averaging.lateness import ROUNDS_MIN, RoundWaits
from tests.gossip.swarm import peer_of

SILENT, PUNCTUAL, SLOW = peer_of(1), peer_of(2), peer_of(3)


def wait(attendance: Attendance, now: float, ready: dict[PeerId, float], *awaited: PeerId) -> None:
    """Record a wish that began at `now` - 5. `ready` counts seconds from its beginning."""
    times = {peer: now - 5.0 + seconds for peer, seconds in ready.items()}
    attendance.attended(now, now - 5.0, awaited, times, 1.0)


def test_nobody_waits_for_an_absent_peer_until_it_returns() -> None:
    attendance = Attendance()
    wait(attendance, 5.0, {PUNCTUAL: 0.1}, SILENT, PUNCTUAL)
    assert attendance.is_waited_for(5.0, PUNCTUAL)
    assert not attendance.is_waited_for(10_000.0, SILENT)
    attendance.came(SILENT)
    assert attendance.is_waited_for(10_000.0, SILENT)


def test_a_silent_peer_awaited_for_almost_the_least_wait_is_missed() -> None:
    attendance = Attendance()
    attendance.attended(5.0, 4.7, [SILENT, PUNCTUAL], {PUNCTUAL: 4.76}, 0.1)
    assert not attendance.is_waited_for(10_000.0, SILENT), (
        "every round waits 0.24 s for a peer that never comes"
    )
    assert attendance.is_waited_for(5.0, PUNCTUAL)


def test_a_peer_that_is_often_late_is_awaited_less_and_less() -> None:
    attendance, now, pauses = Attendance(), 0.0, []
    for _ in range(12):
        now += 5.0
        wait(attendance, now, {PUNCTUAL: 0.0, SLOW: 2.0}, SLOW, PUNCTUAL)
        attendance.came(SLOW)
        begun = now
        while not attendance.is_waited_for(now, SLOW):
            now += 1.0
        pauses.append(now - begun)
    assert pauses[0] == 0.0, "no longer waited for after a single delay"
    assert pauses[1:] == sorted(pauses[1:])
    assert pauses[-1] == BACKOFF_SECONDS_MAX
    wait(attendance, now, {PUNCTUAL: 0.0, SLOW: 0.1}, SLOW, PUNCTUAL)
    wait(attendance, now, {PUNCTUAL: 0.0, SLOW: 2.0}, SLOW, PUNCTUAL)
    attendance.came(SLOW)
    assert attendance.is_waited_for(now, SLOW), "an arrival in time does not reset the record"


def test_a_delay_within_the_allowed_share_of_a_round_counts_as_punctual() -> None:
    attendance = Attendance()
    for number in range(9):
        wait(attendance, 5.0 * number, {PUNCTUAL: 0.0, SLOW: 0.45}, SLOW, PUNCTUAL)
    assert attendance.is_waited_for(50.0, SLOW)


def test_repeated_failures_exclude_a_peer_for_longer_until_a_round_completes() -> None:
    attendance, now, pauses = Attendance(), 0.0, []
    for _ in range(10):
        attendance.failed(now, [SILENT], 2.0)
        begun = now
        while attendance.is_left_out(now, SILENT):
            now += 1.0
        pauses.append(now - begun)
    assert pauses[0] >= LEFT_OUT_SECONDS_MIN
    assert pauses == sorted(pauses)
    assert pauses[-1] == BACKOFF_SECONDS_MAX
    attendance.failed(now, [SILENT], 2.0)
    attendance.completed([SILENT])
    assert not attendance.is_left_out(now, SILENT)
    assert attendance.has_completed(SILENT)


def test_one_withdrawal_is_not_a_failure() -> None:
    attendance = Attendance()
    for _ in range(WITHDRAWALS_MAX - 1):
        attendance.withdrew(0.0, [PUNCTUAL], 1.0)
    assert not attendance.is_left_out(0.0, PUNCTUAL)
    attendance.withdrew(0.0, [PUNCTUAL], 1.0)
    assert attendance.is_left_out(0.0, PUNCTUAL)


def test_all_silent_newcomers_share_one_backoff() -> None:
    attendance, now, waited = Attendance(), 0.0, 0
    attendance.completed([PUNCTUAL])
    for number in range(100):
        now, newcomer = now + 6.0, peer_of(100 + number)
        if attendance.is_waited_for(now, newcomer):
            waited += 1
            wait(attendance, now, {PUNCTUAL: 0.0}, newcomer, PUNCTUAL)
    assert waited < 10


def test_attendance_records_are_bounded_and_keep_peers_that_completed() -> None:
    attendance = Attendance()
    attendance.completed([PUNCTUAL])
    for number in range(RECORDS_MAX + 100):
        attendance.came(peer_of(10 + number))
    assert attendance.has_completed(PUNCTUAL)
    assert len(attendance._records) == RECORDS_MAX


def test_an_excluded_peer_is_tried_once_per_failure() -> None:
    """Because of this, two peers that exclude each other meet again, and a silent peer that proposes a group
    costs only one attempt."""
    attendance = Attendance()
    assert not attendance.declines(0.0, PUNCTUAL)
    attendance.failed(0.0, [PUNCTUAL], 1.0)
    assert [attendance.declines(1.0, PUNCTUAL) for _ in range(3)] == [False, True, True]
    attendance.failed(2.0, [PUNCTUAL], 2.0)
    assert attendance.is_left_out(33.0, PUNCTUAL)
    assert attendance.declines(9.0, PUNCTUAL), "tried again before a quarter of the 32 s was over"
    assert [attendance.declines(10.0, PUNCTUAL) for _ in range(2)] == [False, True]
    attendance.completed([PUNCTUAL])
    assert not any(attendance.declines(11.0, PUNCTUAL) for _ in range(3))


def test_a_peer_that_completed_rounds_is_excused_once_in_ten_minutes() -> None:
    attendance = Attendance()
    attendance.completed([PUNCTUAL])
    attendance.failed(0.0, [PUNCTUAL, SILENT], 4.0)
    assert attendance.is_left_out(1.0, SILENT)
    assert not attendance.is_left_out(1.0, PUNCTUAL)
    assert not attendance.is_waited_for(1.0, PUNCTUAL), "waited for again before it came"
    attendance.came(PUNCTUAL)
    assert attendance.is_waited_for(1.0, PUNCTUAL)
    attendance.completed([PUNCTUAL])
    attendance.failed(EXCUSE_SECONDS - 1.0, [PUNCTUAL], 4.0)
    assert attendance.is_left_out(EXCUSE_SECONDS, PUNCTUAL), "excused twice within ten minutes"
    attendance.completed([PUNCTUAL])
    attendance.failed(EXCUSE_SECONDS, [PUNCTUAL], 4.0)
    assert not attendance.is_left_out(EXCUSE_SECONDS, PUNCTUAL)


def test_a_dispute_excludes_only_peers_that_never_completed_a_round() -> None:
    attendance, pauses = Attendance(), []
    attendance.completed([PUNCTUAL])
    for number in range(5):
        now = 1_000.0 * number
        attendance.disputed(now, [PUNCTUAL, SILENT], 4.0)
        assert not attendance.is_left_out(now, PUNCTUAL)
        pauses.append(next(s for s in range(1_000) if not attendance.is_left_out(now + s, SILENT)))
    assert pauses == [32] * 5, "disputes add up although a dispute is no proof"


def test_a_peer_that_is_always_slightly_late_is_waited_for_seldom() -> None:
    attendance, now, waited = Attendance(), 0.0, 0.0
    attendance.completed([PUNCTUAL, SLOW])
    for _ in range(200):
        now += 1.0
        awaited = [peer for peer in (PUNCTUAL, SLOW) if attendance.is_waited_for(now, peer)]
        waited += 0.2 * (SLOW in awaited)
        times = {PUNCTUAL: now, SLOW: now + 0.2} if SLOW in awaited else {PUNCTUAL: now}
        attendance.attended(now + 0.2, now, awaited, times, 1.0, {PUNCTUAL: 0.3, SLOW: 0.1})
    assert 0.4 < waited < 0.02 * 200


def test_one_stall_of_a_punctual_peer_is_excused() -> None:
    attendance = Attendance()
    attendance.completed([PUNCTUAL, SLOW])
    for number, seconds in enumerate([0.0, 0.01, 0.2, 0.0, 0.01, 0.0]):
        times = {PUNCTUAL: 5.0 * number, SLOW: 5.0 * number + seconds}
        attendance.attended(5.0 * number + seconds, 5.0 * number, list(times), times, 1.0, {SLOW: 0.1})
        assert attendance.is_waited_for(5.0 * number + 1.0, SLOW)


def test_waiting_times_count_from_the_median_arrival() -> None:
    waits = RoundWaits(
        10.0, {PUNCTUAL: 1.0, SLOW: 2.0}, usual=[PUNCTUAL, SLOW], middle_seconds=5.0, others_seconds=0.5
    )
    assert (waits.until(PUNCTUAL), waits.until(SLOW), waits.until(SILENT)) == (16.0, 17.0, 15.5)
    waits.came(12.0, PUNCTUAL)
    assert waits.until(SLOW) == 14.0


def absent(attendance: Attendance, *peers: PeerId, is_strict: bool = False) -> set[PeerId]:
    return set(attendance.absent(peers, is_strict=is_strict))


def test_a_listed_peer_that_never_averages_is_absent_after_some_rounds() -> None:
    attendance = Attendance()
    for _ in range(ROUNDS_MIN):
        assert absent(attendance, PUNCTUAL, SILENT) == set(), (
            "absent although the peer may just be a moment late"
        )
        attendance.completed([PUNCTUAL])
    assert absent(attendance, PUNCTUAL, SILENT) == {SILENT}
    assert absent(attendance, SILENT) == set(), (
        "absent although no other peer is listed, so the run itself may be at fault"
    )


def test_a_peer_whose_silence_failed_an_attempt_is_absent_until_averaging() -> None:
    attendance = Attendance()
    attendance.failed(0.0, [SILENT], 4.0)
    assert absent(attendance, PUNCTUAL, SILENT) == {SILENT}
    attendance.completed([SILENT])
    attendance.failed(100.0, [SILENT], 4.0)
    assert absent(attendance, PUNCTUAL, SILENT) == set(), (
        "absent although a peer that has averaged may only have stalled"
    )


def test_a_peer_that_averaged_is_absent_after_many_rounds_without_it() -> None:
    attendance = Attendance()
    attendance.completed([PUNCTUAL, SLOW])
    for _ in range(ABSENT_ROUNDS_MIN):
        assert absent(attendance, PUNCTUAL, SLOW) == set()
        attendance.completed([PUNCTUAL])
    assert absent(attendance, PUNCTUAL, SLOW) == {SLOW}
    attendance.completed([PUNCTUAL, SLOW])
    assert absent(attendance, PUNCTUAL, SLOW) == set()


def test_in_strict_mode_only_peers_that_averaged_here_are_present() -> None:
    attendance = Attendance()
    assert absent(attendance, PUNCTUAL, SILENT, is_strict=True) == set(), (
        "absent although a newcomer has no records of others yet"
    )
    attendance.completed([PUNCTUAL])
    assert absent(attendance, PUNCTUAL, SILENT, is_strict=True) == {SILENT}
