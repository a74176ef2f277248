"""Receipts of answers. A node that computed for a door (the node that asks) can prove it, and gets a larger
share of other nodes."""

from pathlib import Path

import trio

from node.runs.receipts import ISSUE_SECONDS
from partition.model.graph import encode_graph
from tests.node.serving.scene import ask, holders, manifest, served_by
from tests.node.serving.test_planning import graph
from tests.partition.serve.world import reference, wish
from tests.stack import simulate, swarm


def test_nodes_that_compute_an_answer_get_receipts_for_its_tokens(tmp_path: Path) -> None:
    (tmp_path / "words.peerloom").write_bytes(encode_graph(graph()))

    async def main() -> None:
        async with swarm("abc", parts=served_by()) as group:
            first = group.nodes["a"]
            name, _ = await first.serving.models.learn(tmp_path / "words.peerloom", None)
            service = await first.serving.published.begin(manifest(graph=name), [first.peer])
            await first.serving.published.await_ready(service)
            door = group.nodes[next(each for each in group.nodes if each not in holders(group))]
            assert await ask(door, service, wish(tokens=40)) == reference(wish(tokens=40))
            await trio.sleep(ISSUE_SECONDS + 10)
            for each in holders(group):
                peer = group.nodes[each].peer
                assert door.runs.receipts.contribution(peer).given > 0
                (row, _) = next(iter(group.nodes[each].runs.receipts._earned.values()))
                assert (row.run, row.measurer, row.provider) == (service.id, door.peer, peer)
                assert row.microbatches == 5 + 39, (
                    "the receipt does not cover all tokens of the prompt and of the answer"
                )
            assert not door.runs.receipts._earned

    simulate(main)
