"""Receipts between whole nodes: measured by the committer, signed by the provider, and shown to a third
node."""

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import trio

from crypto.encoding import encode
from node.content.blobs import BlobSink, fetch_all
from node.content.datasets import load_digits
from node.events import StepCommitted
from node.local.stages import stage_ranges
from node.protocols.receipts import OfferReceipt, ShowReceipts
from node.runs.receipts import ISSUE_SECONDS, Receipts
from node.runs.settings import RunServiceSettings
from node.runtime import Node
from node.service_settings import ServiceSettings
from partition.plan.layer_costs import layer_costs
from partition.run.receipts import MEASURED_PURPOSE, Kind, ReceiptBody
from tests import stack
from tests.node.local.test_columns import begin
from tests.node.local.test_runs import QUICK, ends
from tests.node.test_slots import asked, only
from tests.stack import simple_cnn, simulate, swarm
from tests.test_runs_end import all_ended, learn

ALL_RECEIPTS = ServiceSettings(run_service=RunServiceSettings(issued_bytes_min=1))


def test_a_provider_earns_exact_receipts_even_across_a_restart() -> None:
    async def scenario() -> None:
        async with swarm("abc", settings=ALL_RECEIPTS) as group:
            only(group, "b")
            await trio.sleep(5)
            a, b, c = (group.nodes[name] for name in "abc")
            run = stack.prepare(a, stack.manifest(stages=1, replicas=1, microbatches=2, save_every=2))
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
            again = Receipts(
                b.seams, b.signer, b.runs.models, rate=lambda: 1.0, refuse=b.runs.refuse, issued_bytes_min=1
            )
            assert again.document()["earned"] == [earned]
            assert again.contribution(a.peer).given == 0.0
            assert c.runs.receipts.document()["earned"] == []
            await c.copies.fetch(run.text, None, [b.peer])
            await trio.sleep(ISSUE_SECONDS + 5)
            (fetched,) = c.runs.receipts.document()["issued"]
            assert fetched in b.runs.receipts.document()["earned"]
            assert (fetched["kind"], fetched["requester"], fetched["provider"]) == ("checkpoint", a.id, b.id)
            assert fetched["size_bytes"] > 10_000
            assert c.runs.receipts.contribution(b.peer).given == 0.0, (
                "work for another node's run counts as given to c"
            )

    simulate(scenario)


def test_unknown_peers_are_ranked_by_their_receipts() -> None:
    """b computed for a, and a for c. Then b requests a slot of c, which has met neither b nor its work."""

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
            assert c.runs.receipts.contribution(b.peer).weight == 1.0, (
                "b already has weight although it has not asked c for anything"
            )
            c.runs.receipts.weight(b.peer)
            c.runs.receipts.weight(d.peer)
            await trio.sleep(2)
            found = c.runs.receipts.contribution(b.peer)
            assert found.given == 0.0
            assert found.vouched == pytest.approx(c.runs.receipts.contribution(a.peer).given, rel=1e-3)
            assert found.weight > c.runs.receipts.contribution(d.peer).weight == 1.0

    simulate(scenario)


@pytest.mark.parametrize("kind", get_args(Kind))
def test_a_receipt_for_a_run_unknown_to_the_provider_is_not_signed(kind: Kind) -> None:
    async def scenario() -> None:
        async with swarm("ab", preset="lan") as group:
            a, b = group.nodes["a"], group.nodes["b"]
            assert await offered(a, b, kind, 5) == "NoReceipt"
            assert (await call_of(a)(b.peer, ShowReceipts())).receipts == ()

    simulate(scenario)


def test_a_provider_signs_for_no_more_bytes_than_it_sent() -> None:
    """Unearned receipts in favour of a provider would push the valid ones out of its table."""

    async def scenario() -> None:
        async with swarm("ab", preset="lan") as group:
            a, b = group.nodes["a"], group.nodes["b"]
            name = b._blobs.put(b"x" * 1_000)
            sink = BlobSink(a._blobs, a.seams.executor)
            await fetch_all(
                a.network, {name: 1_000}, [b.peer], sink=sink, refuse=a.runs.refuse, clock=a.seams.clock
            )
            assert await offered(a, b, "data", 1_001) == "NoReceipt"
            assert await offered(a, b, "data", 600) == "AcceptedReceipt"
            assert await offered(a, b, "data", 600) == "AcceptedReceipt", (
                "a repeated receipt was refused or counted twice"
            )
            assert await offered(a, b, "checkpoint", 401) == "NoReceipt", (
                "a receipt was signed although all 600 bytes are used up"
            )
            assert await offered(a, b, "data", 1_000) == "AcceptedReceipt"
            (earned,) = b.runs.receipts.document()["earned"]
            assert (earned["kind"], earned["size_bytes"]) == ("data", 1_000)

    simulate(scenario)


def call_of(node: Node) -> Any:
    return node.runs.receipts._call


async def offered(measurer: Node, provider: Node, kind: Kind, amount: int) -> str:
    """Ask a provider to sign a receipt for this amount. Return the type name of the provider's answer."""
    work = (amount, 1, 1_000, kind) if kind == "compute" else (0, 0, 1_000, kind, amount)
    body = encode(ReceiptBody(bytes(32), measurer.peer, provider.peer, *work))
    offer = OfferReceipt(measurer.signer.sign(MEASURED_PURPOSE, body))
    return type(await call_of(measurer)(provider.peer, offer)).__name__


def test_a_holder_in_a_column_earns_receipts_from_its_head() -> None:
    async def scenario() -> None:
        async with swarm("ab", stage_seconds=0.2, preset="lan") as group:
            run = await begin(group, replicas=1, steps=6)
            await ends(group, "ab", 400.0)
            await trio.sleep(ISSUE_SECONDS + 5)
            a, b = (group.nodes[name] for name in "ab")
            (earned,), (issued,) = b.runs.receipts.document()["earned"], a.runs.receipts.document()["issued"]
            assert earned == issued
            assert (earned["kind"], earned["requester"], earned["measurer"]) == ("compute", a.id, a.id)
            assert earned["microbatches"] == 6 * run.manifest.microbatches
            last = stage_ranges(run.manifest, stack.MODELS[run.manifest.graph].graph)[1]
            costs = layer_costs(stack.MODELS[run.manifest.graph].graph, run.manifest.sizes_max)[slice(*last)]
            assert earned["flops"] == earned["microbatches"] * 3 * sum(row.forward_flops for row in costs)
            assert a.runs.receipts.contribution(b.peer).given == pytest.approx(earned["flops"], rel=1e-4)

    simulate(scenario)


def large(folder: Path) -> None:
    """Return data of many pieces: the digits, repeated."""
    digits = load_digits()
    x, y = (np.tile(digits.train[name], (8, *[1] * (digits.train[name].ndim - 1))) for name in "xy")
    np.savez(folder / "train.npz", x=x.astype("f4"), y=y)
    np.savez(folder / "test.npz", x=digits.test["x"][:8].astype("f4"), y=digits.test["y"][:8])


def test_members_sign_receipts_for_data_and_for_averaging(
    tmp_path: Path,
) -> None:
    large(tmp_path)

    async def scenario() -> None:
        async with swarm("abc", stage_seconds=0.2, preset="lan", settings=ALL_RECEIPTS) as group:
            a, b, c = (group.nodes[name] for name in "abc")
            only(group, "b")
            await trio.sleep(5)
            wanted = stack.manifest(
                stages=1,
                replicas=0,
                microbatches=2,
                microbatch=16,
                dtype="float32",
                local=QUICK,
                data=await learn(group, tmp_path),
                test_samples=8,
                steps=60,
            )
            run = stack.prepare(a, wanted)
            await a.runs.submit(run)
            with trio.fail_after(60):
                while not any(isinstance(event, StepCommitted) for event in group.events["b"]):  # noqa: ASYNC110
                    await trio.sleep(0.2)
            group.kill("a")  # from now on only b has the data
            c.limit(accept_runs="swarm")
            await ends(group, "bc", 400.0)
            await trio.sleep(ISSUE_SECONDS + 5)
            issued = c.runs.receipts.document()["issued"]
            assert {row["kind"] for row in issued} == {"data", "averaging"}
            assert {(row["run"], row["requester"], row["provider"]) for row in issued} == {
                (run.text, a.id, b.id)
            }
            assert sorted(issued, key=str) == sorted(b.runs.receipts.document()["earned"], key=str)
            assert {row["kind"] for row in c.runs.receipts.document()["earned"]} == {"averaging"}
            assert c.runs.receipts.contribution(b.peer).weight == 1.0, (
                "b has weight at c although b did no work for runs of c"
            )

    simulate(scenario)
