"""Peers with a target batch that trained alone from the same state and then meet again."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path

from node.library.sync import SyncNode
from node.optimizer.wrapper import PeerOptimizer
from tests.node.optimizer.conftest import open_node
from tests.node.optimizer.test_wrapper import adamw, backward, batch_of, model_of, together, until, weights

STEPS_MAX = 40


def test_peers_that_trained_alone_converge_to_one_state(tmp_path: Path) -> None:
    with ExitStack() as stack:
        # Two swarms of one node each, which a third node joins later.
        nodes: list[SyncNode] = [open_node(stack, tmp_path / name) for name in ("one", "other")]
        models = [model_of(), model_of()]
        optimizers: list[PeerOptimizer] = together(
            *(
                partial(
                    me.optimizer,
                    adamw(model),
                    "apart",
                    model=model,
                    target_batch_size=32,
                    aggregate="mean",
                    join_seconds=0.2,
                )
                for me, model in zip(nodes, models, strict=True)
            )
        )

        def train(at: int, steps: int) -> None:
            number = 0
            while optimizers[at].stats.global_step < steps:
                backward(models[at], batch_of(100 * at + number))
                optimizers[at].step()
                number += 1

        together(*(partial(train, at, 1) for at in range(2)))
        assert [each.global_step for each in optimizers] == [1, 1]
        assert weights(models[0]) != weights(models[1])
        open_node(stack, tmp_path / "third", *nodes)
        until(lambda: all(each.stats.peers == 1 for each in optimizers))
        for steps in range(3, STEPS_MAX, 2):
            together(*(partial(train, at, steps) for at in range(2)))
            if weights(models[0]) == weights(models[1]):
                break
        assert weights(models[0]) == weights(models[1])
        assert sum(each.stats.states_loaded for each in optimizers) >= 1
