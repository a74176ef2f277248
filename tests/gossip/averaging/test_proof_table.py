"""A full table keeps the most important proofs of lies."""

from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.facts import Fact
from gossip.averaging.evidence import Evidence
from gossip.averaging.proof_table import ProofStanding, ProofTable
from tests.gossip.averaging.network import group_of, members_of
from tests.gossip.swarm import peer_of

ROOM = 4
GROUP = group_of(members_of(3), 4)
RUN = GROUP.name


def proof_of(number: int) -> Evidence:
    fact = Fact(peer_of(number), b"", bytes(64))
    return Evidence(GROUP, "averaging-seal", fact, fact)


@given(
    added=st.lists(st.integers(0, 20), min_size=1, max_size=40),
    standings=st.lists(st.sampled_from(ProofStanding), min_size=21, max_size=21),
)
@settings(max_examples=150, deadline=None)
def test_a_proof_never_evicts_one_about_a_more_important_author(
    added: list[int], standings: list[ProofStanding]
) -> None:
    standing_of = dict(zip(map(peer_of, range(21)), standings, strict=True))
    table = ProofTable(lambda _, peer: standing_of[peer], ROOM)
    for number in added:
        if (RUN, peer_of(number)) in table:
            continue
        before = {liar for liar, _ in table.of_run(RUN)}
        is_kept = table.add(peer_of(number), proof_of(number))
        after = {liar for liar, _ in table.of_run(RUN)}
        assert is_kept == (peer_of(number) in after)
        assert len(after) == min(ROOM, len(before) + 1)
        gone = (before | {peer_of(number)}) - after
        assert all(standing_of[each] <= min(standing_of[one] for one in after) for each in gone)


def test_a_proof_is_kept_after_its_author_becomes_inactive() -> None:
    standing_of = {peer_of(0): ProofStanding.COMPLETED}
    table = ProofTable(lambda _, peer: standing_of.get(peer, ProofStanding.LISTED), ROOM)
    table.add(peer_of(0), proof_of(0))
    again = ProofTable(lambda _, peer: ProofStanding.LISTED, ROOM)
    again.load([(peer_of(0), each) for each in table.kept])
    for number in range(1, 50):
        again.add(peer_of(number), proof_of(number))
    assert (RUN, peer_of(0)) in again
    assert len(again) == ROOM


def test_proofs_about_the_most_important_authors_come_first() -> None:
    standing_of = {peer_of(0): ProofStanding.COMPLETED, peer_of(1): ProofStanding.LISTED}
    table = ProofTable(lambda _, peer: standing_of.get(peer, ProofStanding.UNKNOWN), ROOM)
    for number in range(4):
        table.add(peer_of(number), proof_of(number))
    assert [liar for liar, _ in table.of_run(RUN)] == [peer_of(number) for number in (0, 1, 3, 2)]
