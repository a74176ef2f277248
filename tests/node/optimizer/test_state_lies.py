"""Every combination of a message about states in an optimizer's run, a plausible lie in it, and a peer's
position. Pure logic, without nodes.

Three honest members and one liar send messages to a peer's roster. `RunPosition` then decides which of the
four offered states the peer adopts. `LIES` is complete: a message or a field of a report without an entry
fails a test. Messages of a round are covered in `tests.gossip.averaging.test_lies_by_state`, chunks of a
state in `tests.node.averaging.test_lying_donors`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import get_args

import pytest
from blake3 import blake3
from msgspec.structs import replace

from crypto.encoding import decode, encode
from crypto.identity import PeerId
from gossip.claims import COUNT_MAX, SLACK_STEPS, ClaimedCount, OfferedState, choose_state
from gossip.roster import MESSAGE_BYTES_MAX, Leave, Message, Names, Report, Roster
from node.averaging.transfer import Answer, NoState, Sent, StateOffer
from node.optimizer.position import RunPosition

RUN, TENSORS, HONEST, OTHER = (blake3(name).digest() for name in (b"run", b"tensors", b"honest", b"other"))
ME, LIAR, *MEMBERS = (PeerId(blake3(bytes([number])).digest()) for number in range(5))
LOCAL_STEPS = 4
FAR = (-SLACK_STEPS, -1, 1, 4, SLACK_STEPS, 100, 2**20, COUNT_MAX - 1)
COUNTS = (0, 1, 64, 10**6, COUNT_MAX - 1)
RIGHT = b"r" * 32
"""The digest of the state that honest members at the same step hold."""

Lie = Callable[[Report], Message | None]


def says(**fields: object) -> Lie:
    return lambda report: replace(report, **fields)


def counts(field: str) -> dict[str, Lie]:
    def off(by: int) -> Lie:
        return lambda report: replace(
            report, **{field: min(COUNT_MAX - 1, max(0, getattr(report, field) + by))}
        )

    return {f"{field} {by:+}": off(by) for by in FAR}


LIES: dict[str, dict[str, Lie]] = {
    "Report.run": {"another run": says(run=OTHER)},
    "Report.signature": {"other tensors": says(signature=OTHER)},
    "Report.number": {"the last number": says(number=2**48 - 1), "an old one": says(number=0)},
    "Report.claimed_step": counts("claimed_step"),
    "Report.claimed_samples": {f"{count} samples": says(claimed_samples=count) for count in COUNTS},
    "Report.claimed_rounds": counts("claimed_rounds"),
    "Report.lineage": {
        "apart": says(lineage=OTHER),
        "the smallest": says(lineage=bytes(32)),
        "the largest": says(lineage=b"\xff" * 32),
    },
    "Report.has_state": {"no state": says(has_state=False)},
    "Report.asks": {"asks": says(asks=True)},
    "Report.settings": {"other settings": says(settings=b"x" * 16)},
    "Report": {
        "all at once": lambda report: replace(
            report, claimed_step=2**20, claimed_rounds=2**20, claimed_samples=COUNT_MAX - 1, lineage=OTHER
        ),
        "a little of all": lambda report: replace(
            report,
            claimed_step=report.claimed_step + 1,
            claimed_rounds=report.claimed_rounds + 1,
            lineage=OTHER,
        ),
        "silence": lambda report: None,
    },
    "Names": {
        "invented peers": lambda report: Names(RUN, tuple(bytes([each]) * 32 for each in range(1, 9))),
        "the members": lambda report: Names(RUN, tuple(MEMBERS)),
    },
    "Leave": {"goodbye": lambda report: Leave(RUN)},
}
OFFERS: dict[str, Callable[[int], OfferedState | None]] = {
    "StateOffer.step": lambda step: OfferedState(ClaimedCount(step + SLACK_STEPS), RIGHT),
    "StateOffer.digest": lambda step: OfferedState(ClaimedCount(step), OTHER),
    "StateOffer": lambda step: OfferedState(ClaimedCount(2**20), OTHER),
    "NoState": lambda step: None,
}
"""The liar's answers to requests for a state."""


@dataclass(frozen=True)
class Position:
    """A peer that has made `step` steps with `lineage`, among honest members that have made `others`
    steps."""

    step: int
    lineage: bytes
    others: int
    rounds: int = 0
    is_joined: bool = True


POSITIONS = {
    "a newcomer": Position(0, bytes(32), 50, rounds=12, is_joined=False),
    "a newcomer at the beginning": Position(0, OTHER, 0, is_joined=False),
    "at the beginning": Position(0, HONEST, 0),
    "with the others": Position(50, HONEST, 50, rounds=12),
    "a few behind": Position(48, OTHER, 50, rounds=12),
    "behind": Position(30, OTHER, 50, rounds=12),
}
LIED = [(name, lie) for row in LIES.values() for name, lie in row.items()]


def test_every_message_and_field_about_states_has_a_lie() -> None:
    fields = {f"Report.{name}" for name in Report.__struct_fields__}
    messages = {kind.__name__ for kind in get_args(Message)}
    assert LIES.keys() == fields | messages
    # for chunks see test_lying_donors
    answers = {kind.__name__ for kind in get_args(Answer)} - {Sent.__name__}
    assert {name.partition(".")[0] for name in OFFERS} == answers == {StateOffer.__name__, NoState.__name__}


def heard(position: Position, lie: Lie) -> list[Report]:
    """Return the reports that a roster has after every member has sent two over the wire. The liar sends
    before and after the honest members."""
    roster = Roster(ME, RUN, TENSORS, Random(1), 0.0, 1)
    for number in (1, 2):
        report = Report(
            RUN, TENSORS, number, position.others, 8, position.rounds, HONEST, has_state=True, settings=b"s"
        )
        said = lie(report)
        spoken = [(peer, report) for peer in MEMBERS]
        told: list[tuple[PeerId, Message]] = [] if said is None else [(LIAR, said)]
        for peer, message in (*told, *spoken, *told):
            sent: Message = decode(encode(message), Message, bytes_max=MESSAGE_BYTES_MAX)
            if sent.run == RUN:
                roster.receive(float(number), peer, sent)
    return list(roster.reports.values())


@pytest.mark.parametrize("local_steps", [None, LOCAL_STEPS], ids=["target batch", "local steps"])
@pytest.mark.parametrize("where", POSITIONS)
def test_no_lie_about_states_misleads_a_peer_among_honest_members(
    where: str, local_steps: int | None
) -> None:
    at = POSITIONS[where]
    for name, lie in LIED:
        place = RunPosition(local_steps)
        place.is_joined = at.is_joined
        if at.is_joined and at.step:
            place.moved(at.step, at.rounds)
        reports = heard(at, lie)
        others = place.others(reports)
        assert len(reports) <= 1 + len(MEMBERS), f"{name}: a member reported on behalf of another"
        taken = place.state_to_take(at.step, at.lineage, others, others)
        if at.step == at.others and at.lineage == HONEST:
            assert taken is None, f"{name}: a peer with the right state replaced it"
            continue
        if taken is None:
            assert local_steps is not None, f"{name}: the peer stays behind"
            assert at.is_joined, f"{name}: the newcomer does not join"
            continue  # with local steps every peer continues from its own state
        if taken.lineage is not None:
            assert taken.lineage == HONEST, f"{name}: the newcomer does not start from the majority's state"
            continue
        assert taken.first <= at.others <= taken.last <= at.others + 2 * SLACK_STEPS * (local_steps or 1), (
            name
        )
        for offer_name, offer in OFFERS.items():
            said = {peer: OfferedState(ClaimedCount(at.others), RIGHT) for peer in MEMBERS}
            lied = offer(at.others)
            offers = said if lied is None else {**said, LIAR: lied}
            chosen = choose_state(offers, taken, Random(1))
            assert chosen, f"{name}, {offer_name}"
            assert LIAR not in chosen, f"{name}, {offer_name}"


def test_invented_peers_enter_no_roster() -> None:
    (_, lie), *_ = LIES["Names"].items()
    assert len(heard(POSITIONS["with the others"], lie)) == len(MEMBERS)
