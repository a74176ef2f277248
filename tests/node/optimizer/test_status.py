"""A status is one sentence. It says what a peer waits for, for how long, and what ends the wait, or why the
peer contributes nothing.
"""

import math
import re
from functools import partial

import torch

from node.library.sync import SyncNode
from node.optimizer.status import StatusLine
from tests.node.optimizer.test_changes import make_pair
from tests.node.optimizer.test_wrapper import adamw, backward, batch_of, model_of, together, weights

Pair = tuple[SyncNode, SyncNode]


def test_non_finite_gradients_are_reported_and_affect_no_step(pair: Pair) -> None:
    peers = make_pair(pair, "sick gradients", model_of, target_batch_size=64)
    (model, well), (sick_model, sick) = peers
    for number in range(2):
        backward(sick_model, batch_of(number) * math.inf)
        sick.step()
    said = sick.status
    assert re.match(r"this peer brings nothing for \d+ s: its gradients are not finite \(0\.weight", said)
    assert "2 batches, left out); a batch whose gradients are finite ends that" in said
    assert sick.stats.last_error == said
    assert sick.stats.samples_dropped == 64

    def train(at: int, steps: int) -> None:
        trained, optimizer = peers[at]
        while optimizer.stats.global_step < steps:
            backward(trained, batch_of(10 + at))
            optimizer.step()

    for steps in range(2, 10):  # a round may fail on a busy machine; the next one synchronizes them
        together(partial(train, 0, steps), partial(train, 1, steps))
        if weights(model) == weights(sick_model):
            break
    assert "brings nothing" not in sick.status
    assert weights(model) == weights(sick_model)
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    assert well.stats.samples_dropped == 0


def test_a_peer_with_non_finite_parameters_gets_a_remedy(pair: Pair) -> None:
    peers = make_pair(pair, "sick parameters", model_of, local_steps=1)
    model, optimizer = peers[0]
    healthy = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        model[2].bias.fill_(math.nan)  # type: ignore[operator]  # a parameter
    assert not optimizer.average_now(1.0)
    assert re.match(
        r"this peer brings nothing for \d+ s: its tensors are not finite \(2\.bias\); a checkpoint that is",
        optimizer.status,
    )
    model.load_state_dict(healthy)
    assert together(*(each.average_now for _, each in peers)) == [True] * 2
    assert "brings nothing" not in optimizer.status


def test_the_status_of_an_incomplete_batch_says_what_is_missing(me: SyncNode) -> None:
    model = model_of()
    optimizer = me.optimizer(adamw(model), "waits", target_batch_size=100)
    backward(model, batch_of(0))
    optimizer.step()
    wanted = r"step 0: 32 of 100 samples, 0 other peers, for \d+ s; the step is made once they are there"
    assert re.fullmatch(wanted, optimizer.status)


def test_the_duration_of_a_status_counts_from_its_start() -> None:
    line = StatusLine("joining")
    assert line.sentence() == "joining"
    line.say("step 3: 4 of 8 samples, 1 peers")
    line._since -= 5
    line.say("step 3: 6 of 8 samples, 1 peers")
    assert line.sentence().startswith("step 3: 6 of 8 samples, 1 peers, for 5 s; ")
    line.say("alone in run 'r'")
    assert line.sentence() == "alone in run 'r', for 0 s; it trains by itself until another peer joins"
