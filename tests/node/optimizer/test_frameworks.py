"""Training frameworks accept the wrapper as an optimizer of torch. Without other peers, the results equal
those of torch alone.

Each test runs only if its framework is installed (extra `frameworks`). Lightning passes a closure to `step`
if it optimizes automatically.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from node.library.sync import SyncNode

STEPS, BATCH = 6, 8


def model_of() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(STEPS * BATCH, 6, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2)


def plainly(model: torch.nn.Module) -> torch.Tensor:
    """Return the parameters after one pass with torch alone."""
    optimizer = adamw(model)
    for inputs, targets in DataLoader(data(), BATCH):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
    return flat(model)


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def test_accelerate_prepares_the_wrapper(me: SyncNode) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = model_of()
    wrapped = me.optimizer(adamw(model), "accelerate", local_steps=2)
    accelerator = accelerate.Accelerator(cpu=True)
    prepared, optimizer, loader = accelerator.prepare(model, wrapped, DataLoader(data(), BATCH))
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.mse_loss(prepared(inputs), targets))
        accelerator.clip_grad_norm_(prepared.parameters(), 1e9)
        optimizer.step()
    assert (wrapped.stats.global_step, wrapped.stats.step_samples) == (STEPS, BATCH)
    torch.testing.assert_close(flat(model), plainly(model_of()))


def test_accelerate_accumulates_gradients_with_the_wrapper(me: SyncNode) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = model_of()
    wrapped = me.optimizer(adamw(model), "accumulate", target_batch_size=2 * BATCH)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    prepared, optimizer, loader = accelerator.prepare(model, wrapped, DataLoader(data(), BATCH))
    for inputs, targets in loader:
        with accelerator.accumulate(prepared):
            accelerator.backward(torch.nn.functional.mse_loss(prepared(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
    assert (wrapped.stats.global_step, wrapped.stats.step_samples) == (STEPS // 2, 2 * BATCH)


def test_the_trainer_of_transformers_accepts_the_wrapper(me: SyncNode, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Regression(torch.nn.Module):
        """A model that returns its loss, as `Trainer` expects."""

        def __init__(self) -> None:
            super().__init__()
            self.net = model_of()

        def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": torch.nn.functional.mse_loss(self.net(inputs), targets)}

    model = Regression()
    wrapped = me.optimizer(adamw(model), "trainer", local_steps=2)
    scheduler = torch.optim.lr_scheduler.ConstantLR(wrapped, 1.0)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "trainer"),
        per_device_train_batch_size=BATCH,
        num_train_epochs=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        max_grad_norm=1e9,
        disable_tqdm=True,
    )
    rows = [
        {"inputs": inputs, "targets": targets}
        for inputs, targets in map(data().__getitem__, range(STEPS * BATCH))
    ]
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, optimizers=(wrapped, scheduler))
    before = flat(model)
    trainer.train()
    assert (wrapped.stats.global_step, wrapped.stats.step_samples) == (STEPS, BATCH)
    assert not torch.equal(before, flat(model))


# a warning that Lightning itself causes with torch 2.13
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
@pytest.mark.parametrize("is_automatic", [True, False])
def test_lightning_trains_with_the_wrapper(me: SyncNode, tmp_path: Path, is_automatic: bool) -> None:
    lightning = pytest.importorskip("lightning")
    model = model_of()
    wrapped = me.optimizer(adamw(model), f"lightning {is_automatic}", local_steps=2)

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]  # a module that may be missing
        """A Lightning module around any module, with an optimizer that is made outside."""

        def __init__(self) -> None:
            super().__init__()
            self.net = model
            self.automatic_optimization = is_automatic

        def training_step(self, batch: Any, number: int) -> Any:
            del number
            loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
            if is_automatic:
                return loss
            optimizer = self.optimizers(use_pl_optimizer=False)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return None

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return wrapped

    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=str(tmp_path),
    )
    trainer.fit(Module(), DataLoader(data(), BATCH))
    assert (wrapped.stats.global_step, wrapped.stats.step_samples) == (STEPS, BATCH)
    torch.testing.assert_close(flat(model), plainly(model_of()))
