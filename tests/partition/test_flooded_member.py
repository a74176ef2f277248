"""A member of a run that receives more heads of the chain than it handles."""

from dataclasses import dataclass
from random import Random

import pytest

from crypto.identity import PeerId
from partition.plan.change import Change, encode_change
from partition.plan.paxos import PaxosChain, PlanDecided
from partition.plan.paxos_messages import ChainHead, Decided
from partition.plan.plan import plan_hash
from partition.run.asks import RenewRun
from partition.run.events import PromisesMade
from partition.run.member import Member
from partition.run.proposals import Surroundings
from partition.run.stored_chain import CALLS_MAX, SENDER_CALLS_MAX, StoredChain
from tests.partition.test_run_member import ONE, PEERS, PLAN, REQUESTER, SPARE, TWO, Node

HEAD = ChainHead(run=PLAN.run, parent=plan_hash(PLAN), height=0, asks=False)


@dataclass
class Flooded:
    """A committer among honest members. It receives two heads from `sender` before each wake."""

    sender: PeerId | None
    renewals: int = 0

    def play(self, seconds: float) -> "Flooded":
        around = Surroundings(lambda: list(PEERS), list, list)
        core = Member(
            REQUESTER, requester=REQUESTER, samples_per_step=8, may_fork=False, around=around, roles=Node()
        )
        core.begin(0.0, PaxosChain(REQUESTER, PLAN, Random(1)), PLAN)
        now = 0.0
        while now < seconds:
            for _ in range(2 if self.sender else 0):
                core.receive(now, self.sender or ONE, HEAD)
            core.wake(now)
            self.renewals += sum(isinstance(ask.request, RenewRun) for ask in core.asks.take())
            for _ in range(sum(isinstance(event, PromisesMade) for event in core.events)):
                core.stored(now)
            core.events.clear()
            core.sends.clear()
            now += 0.5
        return self


@pytest.mark.parametrize("sender", [ONE, SPARE], ids=["member", "stranger"])
def test_a_flood_of_heads_does_not_block_other_duties(sender: PeerId) -> None:
    assert Flooded(sender).play(200.0).renewals == Flooded(None).play(200.0).renewals > 0


@pytest.mark.parametrize("sender", [ONE, SPARE], ids=["member", "stranger"])
def test_a_flood_of_heads_displaces_no_other_messages(sender: PeerId) -> None:
    chain = StoredChain(PaxosChain(REQUESTER, PLAN, Random(1)))
    for _ in range(2 * CALLS_MAX):
        chain.receive(sender, HEAD)
    change = Change(lost=(ONE,))
    chain.receive(TWO, Decided(run=PLAN.run, parent=plan_hash(PLAN), links=(encode_change(change),)))
    found: list[object] = []
    for _ in range(2 * SENDER_CALLS_MAX):
        chain.wake(0.0)
        chain.stored()
        found += chain.take()[1]
    assert [type(event) for event in found] == [PlanDecided]
    assert len(chain.refused) == (SENDER_CALLS_MAX if sender == SPARE else 0)
