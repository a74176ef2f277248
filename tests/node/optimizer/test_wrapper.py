"""The optimizer wrapper, on real nodes in threads of this process."""

import copy
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

import node
from crypto.contact import parse_address
from node import config
from node.errors import UsageError
from node.library.sync import SyncNode
from node.optimizer import plugins
from node.optimizer.open import choose_rule
from node.optimizer.settings import Settings
from node.optimizer.wrapper import PeerOptimizer

torch.set_num_threads(1)
WINDOW_SECONDS = 60.0
Make = Callable[[torch.nn.Module], torch.optim.Optimizer]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Callable[[int], list[SyncNode]]]:
    """Yield a function that makes nodes that know each other."""
    with ExitStack() as stack:
        yield partial(open_nodes, stack, tmp_path)


def open_nodes(stack: ExitStack, folder: Path, count: int) -> list[SyncNode]:
    found: list[SyncNode] = []
    for number in range(count):
        seeds = (parse_address(found[0].addresses[0]),) if found else ()
        settings = config.Config(
            name=f"n{number}",
            data_dir=folder / str(number),
            swarm=config.SwarmSettings(name="optimizer", preset="local"),
            listen=config.Listen(addresses=(config.read_listen("127.0.0.1:0"),)),
            join=config.JoinSettings(lan=False, seeds=seeds),
            resources=config.Resources(calibrate=False),
        )
        found.append(stack.enter_context(node.sync(settings)))
    for each in found:
        each.wait_for_members(count - 1)
    return found


def model_of(seed: int = 0) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def batch_of(number: int, samples: int = 32) -> torch.Tensor:
    return torch.randn(samples, 6, generator=torch.Generator().manual_seed(number))


def backward(model: torch.nn.Module, batch: torch.Tensor) -> None:
    model.zero_grad()
    model(batch).square().sum(1).mean().backward()


def weights(model: torch.nn.Module) -> bytes:
    return b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2)


def motionless(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.0)


def groups(model: torch.nn.Module) -> torch.optim.Optimizer:
    first, second = model[0], model[2]  # type: ignore[index]  # a Sequential
    return torch.optim.SGD(
        [{"params": first.parameters(), "lr": 0.1}, {"params": second.parameters()}], 0.01, 0.9
    )


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait for a condition that a different thread fulfils; the limit applies only if the test fails."""
    waiting = threading.Event()
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition was not met in time"
        waiting.wait(0.005)


def together(*functions: Callable[[], Any]) -> list[Any]:
    """Run functions in separate threads, and return their results."""
    results: list[Any] = [None] * len(functions)
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            results[number] = functions[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


@pytest.mark.parametrize("make", [adamw, groups])
@pytest.mark.parametrize("options", [{"target_batch_size": 32}, {"local_steps": 3}])
def test_without_peers_it_equals_the_plain_optimizer_bit_for_bit(
    nodes: Callable[[int], list[SyncNode]], make: Make, options: dict[str, int]
) -> None:
    plain, wrapped = model_of(), model_of()
    expected = make(plain)
    optimizer = nodes(1)[0].optimizer(make(wrapped), "r", **options)  # type: ignore[arg-type]  # whichever
    for number in range(12):
        for model, each in ((plain, expected), (wrapped, optimizer)):
            backward(model, batch_of(number))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            each.step()
    assert weights(plain) == weights(wrapped)
    assert optimizer.stats.global_step == 12
    assert optimizer.status.startswith("alone in run 'r', for ")
    assert optimizer.status.endswith(" s; it trains by itself until another peer joins")
    # The wrapper's state loads into a plain optimizer, and a plain optimizer's state into the wrapper.
    again = make(plain)
    again.load_state_dict(optimizer.state_dict())
    optimizer.load_state_dict(expected.state_dict())
    for model, each in ((plain, again), (wrapped, optimizer)):
        backward(model, batch_of(99))
        each.step()
    assert weights(plain) == weights(wrapped)


def test_small_batches_accumulate_until_the_target_is_reached(nodes: Callable[[int], list[SyncNode]]) -> None:
    model, plain = model_of(), model_of()
    optimizer = nodes(1)[0].optimizer(adamw(model), "r", target_batch_size=96)
    for number in range(6):
        backward(model, batch_of(number))
        optimizer.step()
    assert optimizer.stats.global_step == 2
    expected = adamw(plain)
    for step in range(2):
        backward(plain, torch.cat([batch_of(3 * step + part) for part in range(3)]))
        expected.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_two_peers_make_one_step_from_the_samples_of_both(nodes: Callable[[int], list[SyncNode]]) -> None:
    a, b = nodes(2)
    models = [model_of(), model_of()]
    first = a.optimizer(adamw(models[0]), "r", target_batch_size=96)
    second = b.optimizer(adamw(models[1]), "r", target_batch_size=96)
    until(lambda: first.stats.peers == second.stats.peers == 1)
    plain = model_of()
    expected = adamw(plain)

    def follow() -> None:
        until(lambda: first.stats.total_samples >= 96)
        first.step()

    for step in range(3):
        backward(models[0], batch_of(10 * step))
        first.step()
        until(lambda: second.stats.total_samples == 32)
        backward(models[1], batch_of(10 * step + 1, 64))
        backward(models[0], batch_of(10 * step + 2, 16))
        # The second peer sees a full batch and waits for the first peer, whose next batch is included.
        together(second.step, follow)
        assert first.stats.global_step == second.stats.global_step == step + 1
        assert weights(models[0]) == weights(models[1])
        assert sorted(first.stats.last_round.shares.values()) == pytest.approx([48 / 112, 64 / 112])  # type: ignore[union-attr]  # there was one
        whole = [batch_of(10 * step), batch_of(10 * step + 1, 64), batch_of(10 * step + 2, 16)]
        backward(plain, torch.cat(whole))
        expected.step()
        for ours, theirs in zip(models[0].parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
    schedules = [each.scheduler(CosineAnnealingLR, T_max=10) for each in (first, second)]
    assert schedules[0].get_last_lr() == schedules[1].get_last_lr()
    assert schedules[0].last_epoch == 3


def test_a_late_peer_and_one_that_missed_rounds_catch_up(
    nodes: Callable[[int], list[SyncNode]],
) -> None:
    a, b = nodes(2)
    model, late_model = model_of(), model_of(seed=7)
    first = a.optimizer(adamw(model), "r", target_batch_size=32)
    schedule = first.scheduler(CosineAnnealingLR, T_max=20)
    for number in range(5):
        backward(model, batch_of(number))
        first.step()
    joined: list[PeerOptimizer] = []
    thread = threading.Thread(
        target=lambda: joined.append(b.optimizer(adamw(late_model), "r", target_batch_size=32))
    )
    thread.start()
    number = 5
    while thread.is_alive():  # the training loop copies the state between two of its steps
        backward(model, batch_of(number))
        first.step(samples=1)
        number += 1
        thread.join(0.02)
    (second,) = joined
    assert second.stats.states_loaded == 1
    assert second.stats.global_step == first.stats.global_step == 5
    assert weights(late_model) == weights(model)
    moments = [each.state_dict()["state"] for each in (first, second)]
    for parameter, memory in moments[0].items():
        for key, value in memory.items():
            assert torch.equal(value, moments[1][parameter][key])
    assert second.scheduler(CosineAnnealingLR, T_max=20).get_last_lr() == schedule.get_last_lr()


def test_local_steps_are_averaged_in_the_background_to_identical_weights(
    nodes: Callable[[int], list[SyncNode]],
) -> None:
    found = nodes(3)
    models = [model_of(), model_of(), model_of()]
    optimizers = together(
        *(
            # A group forms once all are ready, however busy the machine is.
            lambda each=each, model=model: each.optimizer(
                adamw(model), "r", local_steps=10, window_seconds=WINDOW_SECONDS
            )
            for each, model in zip(found, models, strict=True)
        )
    )
    until(lambda: all(each.stats.peers == 2 for each in optimizers))

    def train(number: int) -> None:
        for step in range(15):  # a round starts at the tenth step
            backward(models[number], batch_of(100 * number + step))
            optimizers[number].step()

    together(*(lambda number=number: train(number) for number in range(3)))
    assert together(*(lambda each=each: each.finish(WINDOW_SECONDS) for each in optimizers)) == [True] * 3
    assert [(each.stats.rounds, each.stats.rounds_failed) for each in optimizers] == [(1, 0)] * 3
    assert len({weights(model) for model in models}) == 3, (
        "two peers hold the same weights before the final average"
    )
    assert together(*(each.average_now for each in optimizers)) == [True] * 3
    last = [each.stats.last_round for each in optimizers]
    assert {len(made.shares) for made in last} == {3}
    assert len({weights(model) for model in models}) == 1
    assert all(each.stats.blocked_seconds < WINDOW_SECONDS / 2 for each in optimizers)


def test_unsuitable_optimizers_and_settings_are_refused_with_a_reason(
    nodes: Callable[[int], list[SyncNode]],
) -> None:
    (me,) = nodes(1)
    model = model_of()
    optimizer = me.optimizer(adamw(model), "r", target_batch_size=32)
    with pytest.raises(TypeError, match="SparseAdam"):
        me.optimizer(torch.optim.SparseAdam(model.parameters()), "s", local_steps=1)
    with pytest.raises(ValueError, match="either target_batch_size"):
        me.optimizer(adamw(model), "s", target_batch_size=1, local_steps=1)
    with pytest.raises(TypeError, match="LBFGS"):
        me.optimizer(torch.optim.LBFGS(model.parameters()), "s", local_steps=1)
    with pytest.raises(ValueError, match="the same parameter"):
        me.optimizer([adamw(model), adamw(model)], "s", local_steps=1)
    first, last = model_of()[0], model_of()[2]
    several = me.optimizer([adamw(first), adamw(last)], "several", local_steps=1)
    with pytest.raises(ValueError, match="several optimizers are wrapped"):
        several.add_param_group({"params": []})
    words = torch.nn.Embedding(5, 3, sparse=True)
    sparse = me.optimizer(torch.optim.SGD(words.parameters(), 0.1), "s", target_batch_size=8)
    words(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(TypeError, match="sparse gradient"):
        sparse.step()
    assert isinstance(optimizer, torch.optim.Optimizer)


def test_frozen_parameters_are_neither_sent_nor_stored(nodes: Callable[[int], list[SyncNode]]) -> None:
    model = model_of()
    model[0].requires_grad_(False)
    optimizer = nodes(1)[0].optimizer(adamw(model), "r", local_steps=2, model=model)
    assert [name for name, _, _ in optimizer.rows] == ["2.weight", "2.bias"]


def test_several_optimizers_act_as_one_with_consecutive_state_numbers(
    nodes: Callable[[int], list[SyncNode]],
) -> None:
    def make(model: torch.nn.Sequential) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.SGD(model[0].parameters(), 0.1, 0.9),
            torch.optim.Adam(model[2].parameters(), 0.01),
        ]

    (me,) = nodes(1)
    plain, model, other = model_of(), model_of(), model_of()
    optimizer = me.optimizer(make(model), "r", local_steps=2)
    expected = make(plain)
    for number in range(4):
        backward(plain, batch_of(number))
        backward(model, batch_of(number))
        optimizer.step()
        for each in expected:
            each.step()
    assert weights(plain) == weights(model)
    state = copy.deepcopy(optimizer.state_dict())  # torch's own optimizers hold the tensors themselves
    assert sorted(state["state"]) == [0, 1, 2, 3]
    loaded = me.optimizer(make(other), "s", local_steps=2)
    loaded.load_state_dict(state)
    assert loaded.stats.global_step == 4
    other.load_state_dict(model.state_dict())
    for trained, wrapped in ((model, optimizer), (other, loaded)):
        backward(trained, batch_of(50))
        wrapped.step()
    assert weights(model) == weights(other)


def test_a_grad_scaler_and_schedulers_accept_the_wrapper(
    nodes: Callable[[int], list[SyncNode]],
) -> None:
    plain, model = model_of(), model_of()
    (me,) = nodes(1)
    pairs = [(plain, adamw(plain)), (model, me.optimizer(adamw(model), "r", target_batch_size=32))]
    for each, optimizer in pairs:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        schedule = CosineAnnealingLR(optimizer, T_max=10)
        for number in range(6):
            optimizer.zero_grad()
            loss = each(batch_of(number)).square().sum(1).mean()
            scaler.scale(loss * (float("inf") if number == 3 else 1.0)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
    assert weights(plain) == weights(model)
    assert isinstance(pairs[1][1], PeerOptimizer)
    assert pairs[1][1].stats.global_step == 5, (
        "the batch with non-finite gradients was counted, or another was not"
    )


def test_training_continues_after_the_node_has_stopped(tmp_path: Path) -> None:
    settings = config.Config(
        name="a",
        data_dir=tmp_path / "a",
        swarm=config.SwarmSettings(name="optimizer", preset="local"),
        listen=config.Listen(addresses=(config.read_listen("127.0.0.1:0"),)),
        join=config.JoinSettings(lan=False),
        resources=config.Resources(calibrate=False),
    )
    plain, model = model_of(), model_of()
    expected = adamw(plain)
    with node.sync(settings) as me:
        optimizer = me.optimizer(adamw(model), "r", local_steps=2)
    for number in range(6):
        for each, stepping in ((plain, expected), (model, optimizer)):
            backward(each, batch_of(number))
            stepping.step()
    assert weights(plain) == weights(model)
    assert "the node has ended" in optimizer.status


PACKAGE = '''
from gossip.averaging.codecs import Exact

class Halfway:
    """A person's own strategy: half the way to the mean."""

    local_steps = 1
    grouping = "all"
    mode = "butterfly"
    averages = "parameters"

    def __init__(self, theta, *, local_steps, codec):
        self.local_steps, self.codec = local_steps, codec

    def offer(self, theta):
        return theta.copy()

    def take(self, theta, mean):
        return theta if mean is None else (theta + mean.vector) / 2

    def state(self):
        return {}

    def load(self, state):
        pass

class Mine(Exact):
    """A person's own codec."""
'''
ENTRY_POINTS = """
[peerloom.strategies]
halfway = halfway_package:Halfway
[peerloom.codecs]
mine = halfway_package:Mine
"""


def install(folder: Path) -> None:
    """Write a package in the form that an installer leaves: its module, and the metadata of its entry
    points."""
    (folder / "halfway_package.py").write_text(PACKAGE)
    told = folder / "halfway_package-1.0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: halfway-package\nVersion: 1.0\n")
    (told / "entry_points.txt").write_text(ENTRY_POINTS)


def one_round(
    nodes: Callable[[int], list[SyncNode]], make: Make, local_steps: int = 50, **options: Any
) -> tuple[list[torch.nn.Sequential], list[PeerOptimizer]]:
    """Return two peers that started equal and have made three steps, each on its own batches."""
    found = nodes(2)
    models = [model_of(), model_of()]
    optimizers = together(
        *(
            lambda each=each, model=model: each.optimizer(
                make(model), "r", local_steps=local_steps, window_seconds=WINDOW_SECONDS, **options
            )
            for each, model in zip(found, models, strict=True)
        )
    )
    until(lambda: all(each.stats.peers == 1 for each in optimizers))
    for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        for step in range(3):
            backward(model, batch_of(10 * number + step))
            optimizer.step()
    return models, optimizers


def test_optimizer_moments_are_averaged_too_on_request(
    nodes: Callable[[int], list[SyncNode]],
) -> None:
    models, optimizers = one_round(nodes, adamw, average_moments=True)
    moments = [each.state_dict()["state"] for each in optimizers]
    means = {
        (number, key): (moments[0][number][key] + moments[1][number][key]) / 2
        for number, memory in moments[0].items()
        for key in ("exp_avg", "exp_avg_sq")
        if memory
    }
    assert together(*(each.average_now for each in optimizers)) == [True] * 2
    assert weights(models[0]) == weights(models[1])
    for each in optimizers:
        state = each.state_dict()["state"]
        for (number, key), mean in means.items():
            torch.testing.assert_close(state[number][key], mean)


def test_an_installed_package_adds_a_strategy_and_codec_by_entry_point(
    nodes: Callable[[int], list[SyncNode]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    packages = tmp_path / "site-packages"
    packages.mkdir()
    install(packages)
    with pytest.raises(ValueError, match="no strategy 'halfway'"):
        plugins.strategy_maker("halfway", 1, "float32")
    monkeypatch.syspath_prepend(str(packages))
    models, optimizers = one_round(nodes, adamw, strategy="halfway", codec="mine")
    before = [torch.nn.utils.parameters_to_vector(model.parameters()).detach() for model in models]
    assert together(*(each.average_now for each in optimizers)) == [True] * 2
    mean = (before[0] + before[1]) / 2
    for model, own in zip(models, before, strict=True):
        after = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        torch.testing.assert_close(after, (own + mean) / 2)
    with pytest.raises(ValueError, match="no strategy 'other'"):
        plugins.strategy_maker("other", 1, "float32")
    with pytest.raises(ValueError, match="unknown codec 'other'"):
        plugins.own_codecs("other", "float32")


def test_damping_applies_part_of_a_mean_but_average_now_all(
    nodes: Callable[[int], list[SyncNode]],
) -> None:
    """The optimizer's steps have length zero, so only rounds change the weights."""
    models, optimizers = one_round(nodes, motionless, local_steps=4, damping=0.25)
    with torch.no_grad():
        for parameter in models[1].parameters():
            parameter.add_(1.0)
    before = [torch.nn.utils.parameters_to_vector(model.parameters()).detach() for model in models]
    mean = (before[0] + before[1]) / 2
    for model, optimizer in zip(models, optimizers, strict=True):
        backward(model, batch_of(0))
        optimizer.step()  # the fourth step starts a round
    assert together(*(lambda each=each: each.finish(WINDOW_SECONDS) for each in optimizers)) == [True] * 2
    assert [(each.stats.rounds, each.stats.rounds_failed) for each in optimizers] == [(1, 0)] * 2
    for model, own in zip(models, before, strict=True):
        after = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        torch.testing.assert_close(after, 0.75 * own + 0.25 * mean)
    assert together(*(each.average_now for each in optimizers)) == [True] * 2
    for model in models:
        after = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        torch.testing.assert_close(after, mean)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"local_steps": 5, "damping": 0.0}, "damping=0.0: above 0"),
        ({"local_steps": 5, "damping": 1.5}, "damping=1.5: above 0"),
        ({"target_batch_size": 32, "damping": 0.5}, "damping= is for local_steps="),
        ({"local_steps": 5, "strategy": "diloco", "damping": 0.5}, "damping= is for strategy average"),
    ],
)
def test_an_invalid_damping_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Settings("r", **options)


def test_outer_steps_lead_all_peers_to_one_model(nodes: Callable[[int], list[SyncNode]]) -> None:
    models, optimizers = one_round(nodes, adamw, strategy="diloco")
    assert together(*(each.average_now for each in optimizers)) == [True] * 2
    assert weights(models[0]) == weights(models[1])
    assert weights(models[0]) != weights(model_of())


def test_peers_that_use_the_median_withstand_a_peer_that_sends_noise(
    nodes: Callable[[int], list[SyncNode]],
) -> None:
    models = [model_of(), model_of(), model_of()]
    options: dict[str, Any] = {"local_steps": 1_000, "aggregate": "median", "join_seconds": 0.5}
    optimizers = [
        # A group forms once all are ready, however busy the machine is.
        each.optimizer(adamw(model), "r", window_seconds=WINDOW_SECONDS, **options)
        for each, model in zip(nodes(3), models, strict=True)
    ]
    until(lambda: all(each.stats.peers == 2 for each in optimizers))
    with torch.no_grad():
        for parameter in models[2].parameters():
            parameter.add_(1e6)
    assert together(*(each.average_now for each in optimizers)) == [True] * 3
    assert [weights(model) for model in models] == [weights(model_of())] * 3
    made = optimizers[0].stats.last_round
    assert made is not None
    assert (made.aggregate, made.liars_max, len(made.shares)) == ("median", 1, 3)
    assert optimizers[0].status.endswith("median survives 1 liars")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"strategy": "sparseloco"}, "aggregate median: strategy sparseloco sends only a few values"),
        ({"codec": "topk64", "strategy": "diloco"}, "aggregate median: codec topk64 sends only a few values"),
        ({"strategy": "gossip"}, "aggregate median: strategy gossip averages in pairs"),
        ({"group_size_max": 2}, "aggregate median: in groups of two"),
        ({"average_moments": True}, "aggregate median: average_moments=True"),
    ],
)
def test_an_option_that_contradicts_the_aggregation_rule_is_refused(
    options: dict[str, Any], named: str
) -> None:
    settings = Settings("r", local_steps=5, aggregate="median", **options)
    with pytest.raises(UsageError, match=f"optimizer: {named}"):
        choose_rule(settings, is_private=False)
