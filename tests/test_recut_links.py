"""A link that becomes slow in a live run causes a new plan, just like a slow peer: in virtual time."""

from collections.abc import Callable, Iterable
from functools import cache
from itertools import pairwise

import torch
from torch import nn

from crypto.identity import PeerId
from node.events import Event, RunPlanned, StepCommitted
from partition.capture.task import Task, capture_task, correct, cross_entropy
from sim.network.model import Access, NetworkModel
from sim.network.pace import PeerPace
from sim.worlds.stages import NodeExecutor
from tests.stack import Model, known, manifest, simulate, swarm, train
from tests.test_recut import _ignore, step_seconds

RATE = 3e8
"""FLOP/s of a simulated peer."""
SLOW_AT = 6
"""The step after which the link is slow."""
FAST_MBIT, SLOW_BYTES_PER_SECOND = 1_000.0, 100_000.0
WIDE, NARROW = 256, 8
SLOW_SECONDS = 7.1
"""Seconds of a step over the slow link, with the border in its old position."""


@cache
def waisted_model() -> Model:
    """Return a model in which the best border for computing sends wide activations. Behind it little is left
    to compute, and one border is narrow.
    """
    torch.manual_seed(3)
    widths = [64, WIDE, WIDE, WIDE, WIDE, NARROW, WIDE]
    blocks = [nn.Sequential(nn.Linear(one, other), nn.Tanh()) for one, other in pairwise(widths)]
    module = nn.Sequential(nn.Flatten(), *blocks, nn.Linear(WIDE, 10)).double()
    images, labels = torch.zeros(2, 1, 8, 8, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    return known(
        capture_task(Task(module, (images,), (labels,), cross_entropy, {"correct": correct}, name="waisted"))
    )


def saturated(peer: PeerId) -> Callable[[], Iterable[tuple[PeerId, float, bool]]]:
    """Return measurements of frames to `peer` over the slow link."""
    return lambda: [(peer, SLOW_BYTES_PER_SECOND, True)]


def test_a_slow_link_moves_the_border_to_a_narrower_layer() -> None:
    executors = {name: NodeExecutor(RATE, 1.0, lambda _: 0.0, PeerPace(), _ignore) for name in "ab"}
    wanted = manifest(
        waisted_model(),
        stages=2,
        replicas=1,
        steps=30,
        microbatch=64,
        microbatches=4,
        test_samples=64,
        save_every=100,
        frames="exact",
    )
    access = Access(share=1.0, up_mbit_per_second=FAST_MBIT, down_mbit_per_second=FAST_MBIT)
    found: list[Event] = []

    async def scenario() -> None:
        async with swarm("ab", executors=executors, network=NetworkModel(access=(access,))) as group:

            async def on_event(event: Event) -> None:
                if isinstance(event, StepCommitted) and event.step == SLOW_AT:
                    for name, other in ("ab", "ba"):
                        node = group.nodes[name]
                        up = group.medium.links.at(node.peer).up
                        assert up is not None
                        up.fifo.bytes_per_second = SLOW_BYTES_PER_SECOND
                        # A simulated stream accepts everything immediately, so its sender cannot measure the
                        # rate.
                        node.measurements._frames = saturated(group.nodes[other].peer)

            _, events = await train(group, "b", wanted, on_event)
            found.extend(events)

    simulate(scenario)
    plans = [event for event in found if isinstance(event, RunPlanned)]
    assert len(plans) == 2
    first, second = (plan.layers[0][1] for plan in plans)
    assert (first, second) == (3, 5)  # behind the narrow layer
    assert step_seconds(found, 1) < 0.5 * SLOW_SECONDS
