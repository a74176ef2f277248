"""Scripts that use the optimizer with weight averages, checkpoints, or torch's own DDP."""

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from node.library.sync import SyncNode
from tests.node.optimizer.test_wrapper import adamw, backward, batch_of, model_of, weights


@pytest.fixture
def process_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Yield a process group of torch that has only this process."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_an_average_of_weights_follows_the_models_weights(me: SyncNode) -> None:
    plain, model = model_of(), model_of()
    expected = adamw(plain)
    optimizer = me.optimizer(adamw(model), "ema", local_steps=2, model=model)
    ema = get_ema_multi_avg_fn(0.9)  # type: ignore[no-untyped-call]  # torch's
    averages = [AveragedModel(each, multi_avg_fn=ema) for each in (plain, model)]
    for number in range(4):
        backward(plain, batch_of(number))
        expected.step()
        backward(model, batch_of(number))
        optimizer.step()
        for average, each in zip(averages, (plain, model), strict=True):
            average.update_parameters(each)
    assert weights(averages[0]) == weights(averages[1])
    assert optimizer.stats.step_samples == 32


def test_a_script_resumes_from_its_checkpoint(me: SyncNode, tmp_path: Path) -> None:
    model = model_of()
    optimizer = me.optimizer(adamw(model), "checkpoint", target_batch_size=32)
    optimizer.scheduler(CosineAnnealingLR, T_max=20)

    def train(first: int, last: int) -> None:
        for number in range(first, last):
            backward(model, batch_of(number))
            optimizer.step()

    train(0, 3)
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(saved, tmp_path / "checkpoint.pt")
    train(3, 6)
    expected, rates = weights(model), [group["lr"] for group in optimizer.param_groups]
    optimizer.close()

    model = model_of(seed=5)
    loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    model.load_state_dict(loaded["model"])
    optimizer = me.optimizer(adamw(model), "checkpoint", target_batch_size=32)
    optimizer.scheduler(CosineAnnealingLR, T_max=20)
    optimizer.load_state_dict(loaded["optimizer"])
    assert optimizer.stats.global_step == 3
    train(3, 6)
    assert weights(model) == expected
    assert [group["lr"] for group in optimizer.param_groups] == rates


def test_a_model_in_torchs_own_ddp_trains(me: SyncNode, process_group: None) -> None:
    del process_group
    plain, model = model_of(), model_of()
    expected = adamw(plain)
    wrapped = DistributedDataParallel(model)
    optimizer = me.optimizer(adamw(wrapped), "ddp", target_batch_size=32, model=wrapped)
    for number in range(3):
        backward(plain, batch_of(number))
        expected.step()
        backward(wrapped, batch_of(number))
        optimizer.step()
    assert optimizer.stats.global_step == 3
    assert weights(plain) == weights(model)


def test_clipping_before_a_step_clips_only_this_peers_gradient(me: SyncNode) -> None:
    plain, model = model_of(), model_of()
    pairs = [(plain, adamw(plain)), (model, me.optimizer(adamw(model), "clip", target_batch_size=32))]
    for each, optimizer in pairs:
        for number in range(3):
            backward(each, batch_of(number))
            torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1)
            torch.nn.utils.clip_grad_value_(each.parameters(), 0.01)
            optimizer.step()
    assert weights(plain) == weights(model)


def test_a_fully_compiled_loss_needs_the_batch_size(me: SyncNode) -> None:
    model = model_of()
    loss_of = torch.compile(lambda batch: model(batch).square().mean(), backend="aot_eager")
    optimizer = me.optimizer(adamw(model), "compiled loss", target_batch_size=32)
    loss_of(batch_of(0)).backward()
    with pytest.raises(ValueError, match=r"where the loss is compiled.*batch_size=N"):
        optimizer.step()
    again = me.optimizer(adamw(model), "compiled loss", target_batch_size=32, batch_size=32)
    model.zero_grad()
    loss_of(batch_of(0)).backward()
    again.step()
    assert again.stats.global_step == 1


def test_a_closure_is_called_once_and_its_loss_returned(me: SyncNode) -> None:
    plain, model = model_of(), model_of()
    pairs = [(plain, adamw(plain)), (model, me.optimizer(adamw(model), "closure", target_batch_size=32))]
    losses = []
    for each, optimizer in pairs:

        def closure(each: torch.nn.Module = each) -> float:
            backward(each, batch_of(0))
            return float(each(batch_of(0)).detach().square().mean())

        losses.append(optimizer.step(closure))
    assert losses[0] == losses[1] is not None
    assert weights(plain) == weights(model)


def test_a_copy_of_a_model_trains_separately(me: SyncNode) -> None:
    model = model_of()
    optimizer = me.optimizer(adamw(model), "copy", target_batch_size=32)
    backward(model, batch_of(0))
    copied = copy.deepcopy(model)
    optimizer.step()
    assert weights(copied) == weights(model_of())
