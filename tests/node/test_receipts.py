"""Receipts between whole nodes: measured by the committer, signed by the provider, shown to a third."""

from typing import Any

import pytest
import trio

from crypto.encoding import encode
from node.runs.receipts import ISSUE_SECONDS, OfferReceipt, Receipts, ShowReceipts
from partition.plan.layer_costs import layer_costs
from partition.run.receipts import MEASURED_PURPOSE, ReceiptBody
from tests.node.test_slots import asked, only
from tests.stack import simple_cnn, simulate, swarm
from tests.test_runs_end import all_ended


def test_a_provider_earns_a_receipt_of_exactly_what_it_computed_over_a_restart() -> None:
    async def scenario() -> None:
        async with swarm("abc") as group:
            only(group, "b")
            await trio.sleep(5)
            a, b, c = (group.nodes[name] for name in "abc")
            run = asked(a, 1)
            await a.runs.submit(run)
            await all_ended(group)
            await trio.sleep(ISSUE_SECONDS + 5)
            (earned,), (issued,) = b.runs.receipts.document()["earned"], a.runs.receipts.document()["issued"]
            assert earned == issued
            manifest = run.manifest
            microbatches = manifest.steps * manifest.microbatches
            costs = layer_costs(simple_cnn().graph, manifest.sizes_max)
            assert earned["microbatches"] == microbatches
            assert earned["flops"] == microbatches * 3 * sum(row.forward_flops for row in costs)
            assert (earned["run"], earned["requester"], earned["measurer"]) == (run.text, a.id, a.id)
            assert a.runs.receipts.contribution(b.peer).given == pytest.approx(earned["flops"], rel=1e-4)
            again = Receipts(b.seams, b.signer, b.runs.models, rate=lambda: 1.0, refuse=b.runs.refuse)
            assert again.document()["earned"] == [earned]
            assert again.contribution(a.peer).given == 0.0
            assert c.runs.receipts.document()["earned"] == []

    simulate(scenario)


def test_a_provider_ranks_a_requester_it_never_met_by_what_that_gave_to_others() -> None:
    """b computed for a, a computed for c; b asks c, which has met neither b nor its work."""

    async def scenario() -> None:
        async with swarm("abcd", preset="lan") as group:
            a, b, c, d = (group.nodes[name] for name in "abcd")
            for requester, provider, number in ((c, "a", 1), (a, "b", 2)):
                for node in group.nodes.values():
                    node.limit(accept_runs="swarm")
                only(group, provider)
                await trio.sleep(5)
                await requester.runs.submit(asked(requester, number))
                await all_ended(group)
                await trio.sleep(ISSUE_SECONDS + 5)
            assert c.runs.receipts.contribution(b.peer).weight == 1.0, "nobody has asked b yet"
            c.runs.receipts.weight(b.peer)
            c.runs.receipts.weight(d.peer)
            await trio.sleep(2)
            found = c.runs.receipts.contribution(b.peer)
            assert found.given == 0.0
            assert found.vouched == pytest.approx(c.runs.receipts.contribution(a.peer).given, rel=1e-3)
            assert found.weight > c.runs.receipts.contribution(d.peer).weight == 1.0

    simulate(scenario)


def test_a_receipt_for_a_run_that_was_never_here_is_not_signed() -> None:
    async def scenario() -> None:
        async with swarm("ab", preset="lan") as group:
            a, b = group.nodes["a"], group.nodes["b"]
            body = encode(ReceiptBody(bytes(32), a.peer, b.peer, 5, 1, 1_000))
            offer = OfferReceipt(a.signer.sign(MEASURED_PURPOSE, body))
            call: Any = a.runs.receipts._call
            assert type(await call(b.peer, offer)).__name__ == "Nothing"
            assert (await call(b.peer, ShowReceipts())).receipts == ()

    simulate(scenario)
