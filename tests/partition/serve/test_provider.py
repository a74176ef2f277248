"""The provider's part in serving: which doors it serves, in which order, and limits on unknown peers."""

import numpy as np
import pytest

from crypto.errors import RemoteProtocolError
from crypto.identity import Identity, PeerId
from partition.serve.bounds import PeerBounds
from partition.serve.messages import (
    UNIT_TOKENS_MAX,
    Answer,
    Carried,
    CloseCode,
    LeaveSession,
    Message,
    OpenSession,
    RestSession,
    Sends,
    SessionBase,
    SessionClosed,
    SessionOpened,
    UnitWork,
)
from partition.serve.provider import (
    IDLE_FORKS_MAX,
    SESSIONS_PER_DOOR_MAX,
    ComputeBatch,
    ForgetSession,
    ForkSession,
    SessionProvider,
)
from partition.serve.served_session import WAITING_BYTES_PER_DOOR_MAX
from partition.serve.session_places import PATIENCE_SECONDS, SESSIONS_MAX
from partition.serve.timeouts import ALIVE_SECONDS, DOOR_SILENCE_SECONDS_MAX
from partition.serve.turns import BATCH_TOKENS_MAX

SERVICE = bytes(32)
NEXT = Identity(bytes([9]) * 32).peer


def peer(number: int) -> PeerId:
    return Identity(number.to_bytes(32)).peer


ALICE, BOB, EVE, ME = peer(101), peer(102), peer(103), peer(104)


def provider(**more: object) -> SessionProvider:
    """Return a provider of the first of two stages."""
    found = SessionProvider(**more)  # type: ignore[arg-type]  # by how it was made
    found.hold(SERVICE, 0, 2, 4_096)
    return found


def session(number: int) -> bytes:
    return number.to_bytes(16)


def opened(core: SessionProvider, door: PeerId, number: int, now: float = 0.0) -> Sends:
    return core.receive(now, door, OpenSession(session(number), SERVICE, 0, door, NEXT))


def unit(number: int, tokens: int, position: int = 0, order: int = 0, stage: int = 0) -> Carried:
    ids = np.zeros(tokens, np.int64)
    return Carried(UnitWork(session(number), order, position, tokens, 0, 0, stage=stage), (("int64", ids),))


def batches(core: SessionProvider) -> list[ComputeBatch]:
    found = [event for event in core.events if isinstance(event, ComputeBatch)]
    core.events.clear()
    return found


def finish(core: SessionProvider, asked: ComputeBatch) -> Sends:
    return core.computed(0.0, SERVICE, asked.batch, [(None, each.arrays) for each in asked.units])


def test_waiting_units_are_computed_together() -> None:
    core = provider()
    for number in range(5):
        opened(core, ALICE, number)
        core.receive(0.0, ALICE, unit(number, 1))
    (first,) = batches(core)
    assert len(first.units) == 1, "the idle stage did not compute the first unit alone"
    finish(core, first)
    (second,) = batches(core)
    assert [each.session for each in second.units] == [session(number) for number in range(1, 5)]


def test_a_long_prompt_does_not_delay_the_tokens_of_another_door() -> None:
    core = provider()
    opened(core, ALICE, 1)
    opened(core, BOB, 2)
    for order in range(8):
        core.receive(0.0, ALICE, unit(1, UNIT_TOKENS_MAX, order * UNIT_TOKENS_MAX, order))
    (asked,) = batches(core)
    core.receive(0.0, BOB, unit(2, 1))
    finish(core, asked)
    (asked,) = batches(core)
    assert session(2) in [each.session for each in asked.units]
    assert sum(each.work.tokens for each in asked.units) <= BATCH_TOKENS_MAX


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_doors_take_turns_by_contribution_whatever_their_sessions(weight: float) -> None:
    core = provider(weight_of=lambda door: weight if door == BOB else 1.0)
    orders = dict.fromkeys(range(11), 0)
    for number in range(8):
        opened(core, ALICE, number)
    for number in (8, 9, 10):
        opened(core, BOB, number)
    computed = {ALICE: 0, BOB: 0}
    for _ in range(40):
        for number in orders:
            door = BOB if number >= 8 else ALICE
            while len(core._sessions[session(number)].parts[0].waiting) < 2:
                core.receive(0.0, door, unit(number, 400, 0, orders[number]))
                orders[number] += 1
        for asked in batches(core):
            for each in asked.units:
                computed[ALICE if each.session < session(8) else BOB] += each.work.tokens
            finish(core, asked)
    assert computed[BOB] == pytest.approx(weight * computed[ALICE], rel=0.25)


def test_a_failing_unit_ends_only_its_own_session() -> None:
    core = provider()
    opened(core, ALICE, 0)
    core.receive(0.0, ALICE, unit(0, 1))
    (busy,) = batches(core)
    for number in range(1, 4):
        opened(core, BOB if number == 2 else ALICE, number)
        core.receive(0.0, BOB if number == 2 else ALICE, unit(number, 1))
    finish(core, busy)
    (batch,) = batches(core)
    assert core.failed(0.0, SERVICE, batch.batch, "failed", "no") == []
    told = []
    for _ in range(3):
        (alone,) = batches(core)
        assert len(alone.units) == 1
        if alone.units[0].session == session(2):
            told += core.failed(0.0, SERVICE, alone.batch, "failed", "no")
        else:
            told += finish(core, alone)
    closed = [(door, message) for door, message in told if isinstance(message, SessionClosed)]
    assert closed == [(BOB, SessionClosed(session(2), "failed", "no"))]
    assert sum(isinstance(message, Carried) for _, message in told) == 2


@pytest.mark.parametrize(
    "message",
    [
        unit(1, 1),
        LeaveSession(session(1)),
        OpenSession(session(1), SERVICE, 0, EVE, NEXT),
        OpenSession(session(7), SERVICE, 0, ALICE, NEXT),
    ],
)
def test_an_unknown_peer_cannot_touch_another_peers_session(message: object) -> None:
    core = provider()
    opened(core, ALICE, 1)
    with pytest.raises(RemoteProtocolError):
        core.receive(0.0, EVE, message)  # type: ignore[arg-type]  # one of the messages
    assert core.sessions == 1
    assert core.receive(0.0, ALICE, unit(1, 1)) == []
    assert batches(core)


def test_units_for_a_later_stage_come_only_from_the_named_peer() -> None:
    core = SessionProvider()
    core.hold(SERVICE, 1, 2, 4_096)
    core.receive(0.0, ALICE, OpenSession(session(1), SERVICE, 1, NEXT, ALICE))
    with pytest.raises(RemoteProtocolError):
        core.receive(0.0, ALICE, unit(1, 1, stage=1))
    core.receive(0.0, NEXT, unit(1, 1, stage=1))
    assert batches(core)


def test_a_door_has_a_bounded_number_of_sessions() -> None:
    core = provider()
    for number in range(SESSIONS_PER_DOOR_MAX):
        assert isinstance(opened(core, ALICE, number)[0][1], SessionOpened)
    assert opened(core, ALICE, 99) == [(ALICE, SessionClosed(session(99), "busy", "too many sessions"))]
    assert isinstance(opened(core, BOB, 100)[0][1], SessionOpened)


def test_a_silent_session_makes_room_and_its_door_is_told() -> None:
    core = provider()
    doors = [peer(200 + number) for number in range(SESSIONS_MAX // SESSIONS_PER_DOOR_MAX)]
    for number in range(SESSIONS_MAX):
        opened(core, doors[number // SESSIONS_PER_DOOR_MAX], number)
    sends = opened(core, BOB, 999, now=PATIENCE_SECONDS + 1)
    assert [type(message) for _, message in sends] == [SessionClosed, SessionOpened]
    assert sends[0][1].code == "evicted"  # type: ignore[union-attr]  # by how it was made
    assert sends[0][0] in doors
    assert core.sessions == SESSIONS_MAX
    assert core.events == [], "the stage still keeps part of the session"


def test_a_session_that_waits_for_this_node_is_not_evicted() -> None:
    core = provider()
    doors = [peer(200 + number) for number in range(SESSIONS_MAX // SESSIONS_PER_DOOR_MAX)]
    for number in range(SESSIONS_MAX):
        door = doors[number // SESSIONS_PER_DOOR_MAX]
        opened(core, door, number)
        core.receive(0.0, door, unit(number, 1))
    assert [message for _, message in opened(core, doors[0], 999, now=60.0)] == [
        SessionClosed(session(999), "busy", "too many sessions")
    ]


def test_waiting_units_of_one_door_are_limited_in_bytes() -> None:
    core = provider()
    opened(core, ALICE, 1)
    opened(core, BOB, 2)
    row = np.zeros(WAITING_BYTES_PER_DOOR_MAX // 2, np.uint8)
    for order in range(3):
        work = UnitWork(session(1), order, order, 1, 0, 0)
        sends = core.receive(0.0, ALICE, Carried(work, (("uint8", row),)))
    assert not sends, "the unit that is being computed counts as waiting"
    sends = core.receive(0.0, ALICE, Carried(UnitWork(session(1), 3, 3, 1, 0, 0), (("uint8", row),)))
    assert [message.code for _, message in sends] == ["busy"]  # type: ignore[union-attr]  # by how it was made
    assert core.receive(0.0, BOB, unit(2, 1)) == []


def test_a_unit_beyond_the_kept_tokens_is_reported_to_its_door() -> None:
    core = provider()
    opened(core, ALICE, 1)
    ((door, closed),) = core.receive(0.0, ALICE, unit(1, 1, position=5))
    assert (door, closed) == (ALICE, SessionClosed(session(1), "position", "0 tokens are kept"))


def test_a_unit_may_roll_its_session_back() -> None:
    core = provider()
    opened(core, ALICE, 1)
    core.receive(0.0, ALICE, unit(1, 8))
    core.receive(0.0, ALICE, unit(1, 2, position=3, order=1))
    ((_, closed),) = core.receive(0.0, ALICE, unit(1, 1, position=6, order=2))
    assert isinstance(closed, SessionClosed)
    assert closed.reason == "5 tokens are kept"


def test_a_silent_or_departed_door_loses_its_sessions() -> None:
    core = provider()
    opened(core, ALICE, 1)
    opened(core, BOB, 2)
    core.lost(ALICE)
    assert core.sessions == 1
    now = 0.0
    while now < DOOR_SILENCE_SECONDS_MAX + 1:
        now += ALIVE_SECONDS
        core.wake(now)
    assert core.sessions == 0
    assert core.deadline == float("inf")


def test_a_session_that_ends_while_computed_is_forgotten_afterwards() -> None:
    core = provider()
    opened(core, ALICE, 1)
    core.receive(0.0, ALICE, unit(1, 1))
    (asked,) = batches(core)
    core.receive(0.0, ALICE, LeaveSession(session(1)))
    assert not core.events
    assert finish(core, asked) == []
    assert core.events == [ForgetSession(SERVICE, 0, session(1))]


def test_a_stage_that_ends_closes_its_sessions_with_the_reason() -> None:
    core = provider()
    opened(core, ALICE, 1)
    assert core.release(SERVICE, 0, "leaving", "it leaves") == [
        (ALICE, SessionClosed(session(1), "leaving", "it leaves"))
    ]
    assert [message.code for _, message in opened(core, ALICE, 2)] == ["unknown"]  # type: ignore[union-attr]  # by how it was made


def test_a_refused_door_learns_the_reason() -> None:
    core = provider(refuses=lambda _service, door: "for listed peers only" if door == EVE else "")
    assert opened(core, EVE, 1) == [(EVE, SessionClosed(session(1), "refused", "for listed peers only"))]


def test_a_session_ends_once_its_door_spent_two_minutes_of_tokens() -> None:
    core = provider(bounds_of=lambda _door: PeerBounds(tokens_per_minute=60))
    opened(core, ALICE, 1)
    for order in range(3):
        sends = core.receive(0.0, ALICE, unit(1, 50, 50 * order, order))
        for asked in batches(core):
            finish(core, asked)
        assert not sends
    ((_, told),) = core.receive(0.0, ALICE, unit(1, 1, 150, 3))
    assert isinstance(told, SessionClosed)
    assert told.reason == "its owner allows 60 tokens a minute to each peer: more in 30 s"
    ((_, told),) = opened(core, ALICE, 2, now=60.0)
    assert isinstance(told, SessionClosed)
    ((_, told),) = opened(core, ALICE, 2, now=91.0)
    assert isinstance(told, SessionOpened)


def test_shared_tokens_count_only_once() -> None:
    core = SessionProvider(bounds_of=lambda _door: PeerBounds(cache_part=0.5))
    core.hold(SERVICE, 0, 2, 4_096, room=400)
    opened(core, ALICE, 0)
    core.receive(0.0, ALICE, unit(0, 128))
    for number in range(1, 4):
        finish(core, batches(core)[-1])
        base = SessionBase(session(0), 128)
        core.receive(0.0, ALICE, OpenSession(session(number), SERVICE, 0, ALICE, NEXT, base))
        assert core.receive(0.0, ALICE, unit(number, 8, 128)) == [], (
            "a unit was refused although 152 of 200 tokens are used"
        )
    finish(core, batches(core)[-1])
    ((_, closed),) = core.receive(0.0, ALICE, unit(3, 64, 136, 1))
    assert isinstance(closed, SessionClosed)
    assert "allows each peer keys and values of 200 tokens" in closed.reason


def both(number: int, base: SessionBase | None = None) -> list[OpenSession]:
    """Return a session at a node that holds both stages."""
    return [
        OpenSession(session(number), SERVICE, 0, ALICE, ME, base),
        OpenSession(session(number), SERVICE, 1, ME, ALICE, base),
    ]


def test_a_session_that_uses_two_stages_of_one_node_counts_once() -> None:
    core = provider(bounds_of=lambda _door: PeerBounds(sessions=1))
    core.hold(SERVICE, 1, 2, 4_096)
    told = [core.receive(0.0, ALICE, each) for each in both(1)]
    assert told == [[(ALICE, SessionOpened(session(1), stage))] for stage in (0, 1)]
    assert core.sessions == 1
    core.receive(0.0, ALICE, unit(1, 5))
    (asked,) = batches(core)
    ((to, passed),) = finish(core, asked)
    assert isinstance(passed, Carried)
    assert isinstance(passed.message, UnitWork)
    assert (to, passed.message.stage) == (ME, 1)
    assert core.receive(0.0, ME, passed) == []
    (asked,) = batches(core)
    assert asked.stage == 1
    answer = Answer(session(1), 0)
    assert core.computed(0.0, SERVICE, asked.batch, [(answer, ())]) == [(ALICE, Carried(answer))]
    assert (core.tokens_of(SERVICE, 0), core.tokens_of(SERVICE, 1)) == (5, 5)
    # The session serves as a base in both stages, and ends in both.
    core.receive(0.0, ALICE, RestSession(session(1)))
    for each in both(2, SessionBase(session(1), 3)):
        core.receive(0.0, ALICE, each)
    assert core.events == [ForkSession(SERVICE, stage, session(2), session(1), 3) for stage in (0, 1)]
    core.events.clear()
    core.receive(0.0, ALICE, LeaveSession(session(2)))
    assert core.events == [ForgetSession(SERVICE, stage, session(2)) for stage in (0, 1)]


@pytest.mark.parametrize("end", ["unit", "leave", "rest"])
def test_a_session_that_uses_two_stages_of_one_node_replaces_its_base(end: str) -> None:
    """The session's first part gets the room. The second part starts from the same base."""
    core = provider()
    core.hold(SERVICE, 1, 2, 4_096)
    for number in range(SESSIONS_PER_DOOR_MAX):
        for each in both(number):
            core.receive(0.0, ALICE, each)
    core.receive(0.0, ALICE, unit(0, 5))
    ((_, passed),) = finish(core, batches(core)[0])
    core.receive(0.0, ME, passed)
    core.computed(0.0, SERVICE, batches(core)[0].batch, [(Answer(session(0), 0), ())])
    core.receive(0.0, ALICE, RestSession(session(0)))
    told = [core.receive(0.0, ALICE, each) for each in both(99, SessionBase(session(0), 3))]
    assert told == [[(ALICE, SessionOpened(session(99), stage))] for stage in (0, 1)]
    assert core.events == [ForkSession(SERVICE, stage, session(99), session(0), 3) for stage in (0, 1)]
    core.events.clear()
    # A third session gets no room, although it starts from the same base.
    third = core.receive(0.0, ALICE, both(100, SessionBase(session(0), 3))[0])
    assert third == [(ALICE, SessionClosed(session(100), "busy", "too many sessions"))]
    endings: dict[str, Message | Carried] = {
        "unit": unit(99, 1, 3),
        "leave": LeaveSession(session(99)),
        "rest": RestSession(session(99)),
    }
    assert core.receive(0.0, ALICE, endings[end]) == [
        (ALICE, SessionClosed(session(0), "evicted", "others wanted the place"))
    ]
    forgotten = [each.session for each in core.events if isinstance(each, ForgetSession)]
    assert forgotten.count(session(0)) == 2
    assert core.sessions == SESSIONS_PER_DOOR_MAX - (end == "leave")


def test_a_released_stage_ends_its_sessions_in_the_nodes_other_stages() -> None:
    core = provider()
    core.hold(SERVICE, 1, 2, 4_096)
    for each in both(1):
        core.receive(0.0, ALICE, each)
    core.receive(0.0, ALICE, unit(1, 5))
    finish(core, batches(core)[0])
    assert core.release(SERVICE, 1, "leaving", "") == [(ALICE, SessionClosed(session(1), "leaving"))]
    assert core.events == [ForgetSession(SERVICE, 0, session(1))]
    core.receive(0.0, ALICE, both(2)[0])
    with pytest.raises(RemoteProtocolError):
        core.receive(0.0, BOB, both(2)[1])


def test_a_door_that_forks_sessions_without_requests_is_refused() -> None:
    core = provider()
    opened(core, ALICE, 0)
    core.receive(0.0, ALICE, unit(0, 128))
    finish(core, batches(core)[-1])
    base = SessionBase(session(0), 128)

    def fork(number: int) -> type[object]:
        told = core.receive(0.0, ALICE, OpenSession(session(number), SERVICE, 0, ALICE, NEXT, base))
        core.receive(0.0, ALICE, LeaveSession(session(number)))
        return type(told[0][1])

    assert {fork(number) for number in range(1, IDLE_FORKS_MAX + 1)} == {SessionOpened}
    assert fork(100) is SessionClosed
    core.receive(0.0, ALICE, unit(0, 1, 128, 1))
    assert fork(101) is SessionOpened, "a door that requests again cannot fork a session"


@pytest.mark.parametrize("way", ["the failing one is known", "one by one", "no page was left"])
def test_a_recomputed_unit_counts_only_once(way: str) -> None:
    core = provider(bounds_of=lambda _door: PeerBounds(tokens_per_minute=60))
    for number in range(4):
        opened(core, BOB if number == 2 else ALICE, number)
    core.receive(0.0, ALICE, unit(0, 1))
    (busy,) = batches(core)
    for number in (1, 2, 3):
        core.receive(0.0, BOB if number == 2 else ALICE, unit(number, 10))
    finish(core, busy)
    (batch,) = batches(core)
    assert len(batch.units) == 3
    if way == "no page was left":
        core.receive(0.0, ALICE, RestSession(session(0)))
    code: CloseCode = "busy" if way == "no page was left" else "failed"
    known = session(2) if way == "the failing one is known" else b""
    core.failed(0.0, SERVICE, batch.batch, code, "no", known)
    while asked := batches(core):
        finish(core, asked[0])
    assert core._spent.spent(0.0, ALICE) == core._turns._served[ALICE] == 21
    assert core._turns._shares[ALICE, 0] == 21
    assert core._spent.spent(0.0, BOB) == 10
