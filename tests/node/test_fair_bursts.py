"""A greedy requester gets no more of many free providers than an honest one. Virtual time.

PEERLOOM_TURNS_SEEDS is the number of seeds for the long test, in which honest requesters submit a hundred
runs to twenty providers.
"""

import os
import sys
from collections.abc import Collection
from statistics import fmean
from typing import Any

import pytest
import trio

from crypto.identity import PeerId
from node.placement.leases import make_plan
from node.placement.turn_rows import SlotWish
from node.placement.turns import CONTEST_SECONDS, SENIOR_SECONDS, FairQueue
from node.protocols.runs import Leased, LeaseRequest
from node.runtime import Node
from partition.plan.plan import encode_plan
from partition.run.asks import Declined
from tests.node.burst_world import Burst, BurstWorld
from tests.node.test_slots import asked, only
from tests.stack import simulate, swarm

SEEDS = int(os.environ.get("PEERLOOM_TURNS_SEEDS", "0"))
FIRST_SEED = int(os.environ.get("PEERLOOM_TURNS_FIRST_SEED", "0"))
SHARE_MAX = 1.1
"""Maximum share of a greedy requester: at most a tenth more than the share of one honest requester."""
LOTS_OFF = 0.2
"""Standard deviation of the share between plays of a hundred runs. Lots decide between equals, so the share
varies.
"""
SMALL: dict[str, Any] = {"providers": 8, "honest": 5, "runs": 6, "outstanding": 8}
PROVIDERS = "efghij"
A, B = b"a" * 32, b"b" * 32


def mean_share(seeds: int, **changes: Any) -> float:
    return sum(BurstWorld(Burst(seed, **changes)).play().share for seed in range(seeds)) / seeds


def test_the_first_requester_exceeds_its_share_without_a_contest() -> None:
    assert mean_share(1, **SMALL, contest_seconds=0.0) > 1.25


@pytest.mark.parametrize(
    "changes",
    [
        {"has_fresh_keys": True},
        {"has_fresh_keys": False},
        {"has_fresh_keys": True, "are_seniors": False, "network": b"net"},
    ],
    ids=["new keys among seniors", "one new key", "new keys of one network"],
)
def test_a_newcomer_that_asks_first_gets_no_more_than_its_share(changes: dict[str, Any]) -> None:
    assert mean_share(2, **SMALL, **changes) <= SHARE_MAX


@pytest.mark.skipif(not SEEDS, reason="takes a quarter of a minute a seed: set PEERLOOM_TURNS_SEEDS=10")
@pytest.mark.parametrize(
    "changes",
    [
        {"has_fresh_keys": True},
        {"is_greedy_senior": True},
        {"are_seniors": False},
        {"has_fresh_keys": True, "are_seniors": False, "network": b"net"},
    ],
    ids=["new keys among seniors", "an old key", "a key among new ones", "new keys of one network"],
)
def test_a_greedy_requester_among_a_hundred_runs_gets_only_its_share(changes: dict[str, Any]) -> None:
    """The greedy requester wants more runs than the others, so it exceeds their mean once some of them are
    satisfied. Therefore the test compares its share with two others. The first is the share of an honest
    requester that wants as much, in the same place, where the lots between equals are the same. The second is
    its max-min share at each moment.
    """
    seeds = range(FIRST_SEED, FIRST_SEED + SEEDS)
    greedy = [BurstWorld(Burst(seed, **changes)).play() for seed in seeds]
    is_senior = changes.get("are_seniors", True)
    polite = changes | {"has_fresh_keys": False, "is_greedy_senior": is_senior, "is_polite": True}
    honest = [BurstWorld(Burst(seed, **polite)).play() for seed in seeds]
    share, of_honest, due = (
        fmean(each.share for each in greedy),
        fmean(each.share for each in honest),
        fmean(each.due_share for each in greedy),
    )
    figures = (
        f"{share:.3f} of the others' mean, an honest one {of_honest:.3f}; {due:.3f} of the max-min share"
    )
    sys.stderr.write(f"{changes}: {figures}\n")
    assert share <= SHARE_MAX * of_honest, figures
    assert due <= SHARE_MAX + 2 * LOTS_OFF / SEEDS**0.5, figures


def wish(run: int, requester: bytes) -> SlotWish:
    return SlotWish(bytes([run]) * 32, requester)


def contested() -> FairQueue:
    return FairQueue(1, contest_seconds=CONTEST_SECONDS, has_seniors=True)


def test_a_free_slot_goes_to_a_senior_that_asks_during_the_contest() -> None:
    turns = contested()
    turns.met(B, SENIOR_SECONDS)
    first = turns.ask(0.0, wish(1, A))
    assert first is not None
    assert first.is_contested
    assert first.seconds == CONTEST_SECONDS
    assert turns.ask(1.0, wish(2, B)) is not None
    lost = turns.ask(2.0, wish(1, A))
    assert lost is not None, "the newcomer got the slot that is reserved for the senior"
    assert turns.ask(3.0, wish(2, B)) is None


def test_a_lone_requester_gets_the_slot_after_the_contest() -> None:
    turns = contested()
    assert turns.ask(0.0, wish(1, A)) is not None
    assert turns.ask(CONTEST_SECONDS, wish(1, A)) is None


def test_a_run_that_asked_once_blocks_the_slot_only_for_seconds() -> None:
    turns = contested()
    turns.met(B, SENIOR_SECONDS)
    turns.ask(0.0, wish(2, B))
    turns.ask(0.0, wish(1, A))
    assert turns.ask(3.0, wish(1, A)) is not None
    assert turns.ask(6.0, wish(1, A)) is None, (
        "the slot is still reserved although the senior never came back"
    )


def test_resumed_and_displaced_runs_get_a_slot_without_a_contest() -> None:
    turns = contested()
    turns.weigh(A, 2.0)
    assert turns.ask(0.0, wish(1, A)) is None
    assert contested().ask(0.0, wish(2, B), is_contested=False) is None


async def lease_everywhere(node: Node, providers: Collection[PeerId], leased: list[PeerId]) -> None:
    """Request a slot for a new run at each provider, at all simultaneously, and again after each contest."""

    async def lease(provider: PeerId, number: int) -> None:
        run = asked(node, 100 + number)
        graph = await node.runs.models.get(run.manifest.graph_hash, [])
        plan = make_plan(run, graph, [each for each in node.runs.offers() if each.peer == provider])
        request = LeaseRequest(run.fact, encode_plan(plan), 0)
        while not isinstance(reply := await node.runs.ask(provider, request, 10.0), Leased):
            assert isinstance(reply, Declined)
            await trio.sleep(reply.wait_seconds if reply.is_contested and reply.wait_seconds else 1.0)
        leased.append(provider)

    async with trio.open_nursery() as nursery:
        for number, provider in enumerate(providers):
            nursery.start_soon(lease, provider, number)


def test_a_requester_that_asks_all_nodes_first_gets_only_a_share() -> None:
    """Whole nodes: one requester asks all six providers at once. Half a second later three others submit two
    runs each."""
    leased: list[PeerId] = []
    placed: list[str] = []

    async def scenario() -> None:
        async with swarm("abcdefghij", preset="lan", stage_seconds=60.0) as group:
            only(group, *PROVIDERS)
            await trio.sleep(5)

            async def submit(name: str, number: int) -> None:
                await group.nodes[name].runs.submit(asked(group.nodes[name], number), wait_seconds=600.0)
                placed.append(name)

            async with trio.open_nursery() as nursery:
                providers = [group.nodes[name].peer for name in PROVIDERS]
                nursery.start_soon(lease_everywhere, group.nodes["a"], providers, leased)
                await trio.sleep(0.5)
                for name in "bcd":
                    for number in range(2):
                        nursery.start_soon(submit, name, number)
                with trio.fail_after(120):
                    while len(leased) + len(placed) < len(PROVIDERS):  # noqa: ASYNC110 - virtual time
                        await trio.sleep(1)
                nursery.cancel_scope.cancel()

    simulate(scenario)
    assert len(leased) <= 3, f"the first requester got {len(leased)} slots, the others {placed}"
