"""The worth of signed receipts for contributions, even if their signers collude."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.encoding import encode
from crypto.errors import RemoteProtocolError
from crypto.facts import IdentitySigner
from crypto.identity import Identity, PeerId
from partition.run.receipts import (
    ACCEPTED_PURPOSE,
    AGE_SECONDS_MAX,
    HALF_LIFE_SECONDS,
    MEASURED_PURPOSE,
    UNPROVEN_WEIGHT_MAX,
    WEIGHT_MAX,
    Credits,
    Receipt,
    ReceiptBody,
    ReceiptRow,
    check_measured,
    check_receipt,
)

SIGNERS = [IdentitySigner(Identity(bytes([number]) * 32), "default") for number in range(5)]
PEERS = [signer.peer for signer in SIGNERS]
ME, A, B, C, D = PEERS
SHARE = 100.0


def row(
    measurer: PeerId, provider: PeerId, flops: float, at: float = 0.0, run: int = 0, requester: Any = None
) -> ReceiptRow:
    return ReceiptRow(bytes([run]) * 32, requester or measurer, provider, measurer, int(flops), 1, at)


def receipt(measurer: int = 1, provider: int = 2, requester: int = 1, signed_by: int = 2) -> Receipt:
    body = encode(ReceiptBody(bytes(32), PEERS[requester], PEERS[provider], 5, 1, 1_000))
    return Receipt(
        SIGNERS[measurer].sign(MEASURED_PURPOSE, body), SIGNERS[signed_by].sign(ACCEPTED_PURPOSE, body)
    )


def test_a_receipt_names_provider_requester_and_measurer() -> None:
    found = check_receipt(SIGNERS[0], receipt())
    assert (found.provider, found.measurer, found.requester, found.flops, found.at) == (B, A, A, 5, 1.0)


@pytest.mark.parametrize(
    "faulty",
    [receipt(measurer=2), receipt(requester=2), receipt(signed_by=3)],
    ids=["measured by its provider", "for its provider's own run", "signed by another"],
)
def test_a_receipt_signed_only_by_its_beneficiary_is_refused(faulty: Receipt) -> None:
    with pytest.raises(RemoteProtocolError):
        check_receipt(SIGNERS[0], faulty)


def test_the_two_signatures_of_a_receipt_are_over_one_body() -> None:
    one, other = receipt(), receipt(requester=3)
    with pytest.raises(RemoteProtocolError, match="the two facts of a receipt differ"):
        check_receipt(SIGNERS[0], Receipt(one.measured, other.accepted))
    with pytest.raises(RemoteProtocolError, match="signature"):
        check_measured(SIGNERS[0], one.accepted)


def test_receipts_from_a_contributor_vouch_for_an_unknown_peer() -> None:
    known = Credits(ME)
    known.gave(0.0, A, 300.0)
    known.learn(0.0, B, [row(A, B, 200.0)])
    found = known.contribution(0.0, B, SHARE)
    assert (found.given, found.vouched, found.weight) == (0.0, 200.0, 3.0)
    assert known.contribution(0.0, A, SHARE).weight == 4.0, "vouching cost the committer some of its weight"


def test_receipts_between_unknown_peers_count_nothing() -> None:
    known = Credits(ME)
    known.learn(0.0, B, [row(A, B, 1e30)])
    known.learn(0.0, A, [row(B, A, 1e30)])
    assert [known.contribution(0.0, peer, SHARE).weight for peer in (A, B)] == [1.0, 1.0]


def test_own_work_backs_receipts_only_up_to_twice_a_strangers_share() -> None:
    known = Credits(ME)
    known.worked_for(0.0, A, 1e6)
    known.learn(0.0, B, [row(A, B, 1e6)])
    assert known.contribution(0.0, B, SHARE).weight == UNPROVEN_WEIGHT_MAX
    assert known.contribution(0.0, A, SHARE).weight == 1.0, "a peer got weight for being served"


def test_work_for_anothers_run_earns_no_vouched_credit() -> None:
    """An honest member of an attacker's run measures the work of the attacker's other keys in it."""
    known = Credits(ME)
    known.gave(0.0, A, 1e6)
    known.worked_for(0.0, A, 1e6)
    known.learn(0.0, B, [row(A, B, 1e6, requester=C)])
    assert known.contribution(0.0, B, SHARE).weight == 1.0
    known.learn(0.0, B, [row(A, B, 50.0, requester=ME)])
    assert known.contribution(0.0, B, SHARE).vouched == 50.0, (
        "the requester of the run cannot count the receipt"
    )


def test_a_repeated_receipt_counts_once() -> None:
    known = Credits(ME)
    known.gave(0.0, A, 1e6)
    known.learn(0.0, B, [row(A, B, 100.0), row(A, B, 200.0), *[row(A, B, 150.0)] * 9])
    assert known.contribution(0.0, B, SHARE).vouched == 200.0, "two receipts for one run were added up"
    known.learn(0.0, B, [row(A, B, 200.0), row(A, B, 30.0, run=1)])
    assert known.contribution(0.0, B, SHARE).vouched == 230.0


def test_bytes_count_by_their_price_and_averaging_earns_no_vouching() -> None:
    known = Credits(ME)
    known.averaged_with(0.0, B, 1e12)
    assert known.contribution(0.0, B, SHARE).weight == UNPROVEN_WEIGHT_MAX
    known.gave(0.0, A, 1e6)
    bytes_ = [replace(row(A, C, 0), kind=kind, size_bytes=50) for kind in ("data", "checkpoint", "averaging")]
    known.learn(0.0, C, bytes_, flops_per_byte=2.0)
    assert known.contribution(0.0, C, SHARE).vouched == 200.0, "a receipt for averaging earned trust"


@pytest.mark.parametrize("work", [(0, 1, 0, "compute"), (5, 1, 0, "data", 5), (0, 0, 0, "data"), (0, 0, 0)])
def test_a_receipt_for_nothing_or_for_two_kinds_is_refused(work: Any) -> None:
    body = encode(ReceiptBody(bytes(32), A, B, *work))
    with pytest.raises(RemoteProtocolError):
        check_measured(SIGNERS[0], SIGNERS[1].sign(MEASURED_PURPOSE, body))


def test_credit_halves_in_a_month_and_old_receipts_expire() -> None:
    known = Credits(ME)
    known.gave(0.0, A, 100.0)
    assert known.contribution(HALF_LIFE_SECONDS, A, SHARE).given == pytest.approx(50.0)
    known.learn(AGE_SECONDS_MAX + 1, B, [row(A, B, 1e6, at=0.0)])
    assert known.contribution(AGE_SECONDS_MAX + 1, B, SHARE).vouched == 0.0
    assert known.contribution(0.0, A, 1.0).weight == WEIGHT_MAX


PAIRS = st.tuples(st.sampled_from(PEERS), st.sampled_from(PEERS), st.floats(1, 1e15), st.sampled_from(PEERS))


@given(
    given_=st.lists(st.tuples(st.sampled_from(PEERS), st.floats(0, 1e9)), max_size=8),
    worked=st.lists(st.tuples(st.sampled_from(PEERS), st.floats(0, 1e9)), max_size=8),
    signed=st.lists(PAIRS, max_size=30),
    order=st.permutations(PEERS),
)
@settings(max_examples=150, deadline=None)
def test_colluders_gain_at_most_what_they_gave_and_received(
    given_: list[tuple[PeerId, float]],
    worked: list[tuple[PeerId, float]],
    signed: list[tuple[PeerId, PeerId, float, PeerId]],
    order: list[PeerId],
) -> None:
    """Keys sign arbitrary receipts for each other, and show them repeatedly."""
    known = Credits(ME)
    for peer, flops in given_:
        known.gave(0.0, peer, flops)
    for peer, flops in worked:
        known.worked_for(0.0, peer, flops)
    for peer in (*order, *order[:2]):
        rows = [row(one, other, flops, requester=of) for one, other, flops, of in signed if other == peer]
        known.learn(0.0, peer, rows)
    found = [known.contribution(0.0, peer, 1e9) for peer in PEERS if peer != ME]
    gave = sum(flops for peer, flops in given_ if peer != ME)
    assert sum(each.given for each in found) == pytest.approx(gave)
    assert sum(each.vouched for each in found) <= gave * (1 + 1e-9) + 1e-6
    done = sum(flops for peer, flops in worked if peer != ME)
    assert sum(each.witnessed for each in found) <= done * (1 + 1e-9) + 1e-6
    for each in found:
        assert 1.0 <= each.weight <= WEIGHT_MAX
        if each.given + each.vouched == 0:
            assert each.weight <= UNPROVEN_WEIGHT_MAX
