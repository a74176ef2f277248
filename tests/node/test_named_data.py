"""Data with several named inputs and labels of any type, and groups of parameters selected by patterns."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from node import toml
from node.content.datasets import load_folder
from node.errors import UsageError
from node.protocols.run_file import RunFile, check_run_file
from node.runs.data_check import check_values
from node.runs.manifest_builder import bind_data, fits, make_batches, make_manifest
from partition.capture import Captured, Task
from partition.capture.task import captured_and_proved
from partition.model.graph import encode_graph, graph_hash
from partition.model.groups import with_groups
from partition.stage import GroupSettings
from tests.stack import known, simulate, swarm, train, weights

RUN = """
model = "pairs.peerloom"
[train]
steps = 3
batch = 6
microbatch = 3
optimizer = "adamw"
learning_rate = 0.01
weight_decay = 0.2
[[train.groups]]
match = ["*.bias", "norm.*"]
[plan]
stages = 2
replicas = 1
"""


class Pairs(nn.Module):
    """A model with two inputs, one of them a mask. No layer uses `spare`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.inner, self.head, self.spare = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(2, 2)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        kept = mask.unsqueeze(2).to(self.head.weight.dtype)
        inner = torch.tanh(self.inner(self.norm(self.embed(ids))))
        out: Tensor = self.head((inner * kept).sum(1) / kept.sum(1).clamp(min=1))
        return out


def loss(output: Tensor, score: Tensor, kind: Tensor) -> Tensor:
    """Return the loss: a mean over floating-point labels, plus a mean over the class labels that are not
    -100."""
    return functional.mse_loss(output[:, 0], score) + functional.cross_entropy(output, kind)


def arrays(count: int, seed: int) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    kind = draw.integers(0, 2, count)
    kind[::3] = -100
    return {
        "kind": kind.astype(np.int32),
        "mask": draw.integers(0, 2, (count, 5)).astype(np.int8),
        "ids": draw.integers(0, 11, (count, 5)).astype(np.uint8),
        "score": draw.normal(size=count).astype(np.float32),
    }


def captured() -> tuple[Pairs, Captured]:
    torch.manual_seed(0)
    model = Pairs().double()
    tensors = {key: torch.from_numpy(value).long() for key, value in arrays(4, 0).items()}
    inputs = {"ids": tensors["ids"], "mask": tensors["mask"]}
    labels = {"score": torch.zeros(4, dtype=torch.float64), "kind": tensors["kind"]}
    return model, captured_and_proved(Task(model, inputs, labels, loss=loss))[0]


def folder(path: Path, **changes: Any) -> Path:
    for name, count, seed in (("train", 12, 1), ("test", 7, 2)):
        np.savez(path / f"{name}.npz", **(arrays(count, seed) | changes))
    return path


def test_a_run_over_named_arrays_equals_a_plain_loop(tmp_path: Path) -> None:
    model, found = captured()
    run_file = toml.parse(RUN, RunFile, name="RUN.toml").value
    graph = with_groups(found.graph, [table.match for table in run_file.train.groups])
    stored = known(_regrouped(found, graph))
    data = load_folder(folder(tmp_path))
    wanted = make_manifest(run_file, graph, stored.hash, data, name="RUN.toml", created=0.0)
    check_values(graph, data, wanted.sizes_max, "RUN.toml", "data")
    results: list[Any] = []

    async def scenario() -> None:
        async with swarm("abc", preset="lan") as group:
            await group.nodes["a"].runs.data.keep(data.digest, tmp_path)
            run, _ = await train(group, "a", wanted)
            results.append(weights(group, "a", run))

    simulate(scenario)
    plain = [each for name, each in model.named_parameters() if name.endswith("bias") or "norm" in name]
    rest = [each for each in model.parameters() if not any(each is other for other in plain)]
    groups = [{"params": rest, "weight_decay": 0.2}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    batches = make_batches(data, wanted, graph)
    for step in range(3):
        parts = [batches.train(2 * step + number) for number in range(2)]
        columns = [np.concatenate(each) for each in zip(*(i + t for i, t in parts), strict=True)]
        ids, mask, score, kind = map(torch.from_numpy, columns)
        optimizer.zero_grad()
        # Micro-batches are weighted by their number of labels that are not ignored, as the mean over all
        # labels would be.
        total, count = torch.zeros((), dtype=torch.float64), 0
        for part in (slice(0, 3), slice(3, 6)):
            known_labels = int((kind[part] != -100).sum())
            total = total + loss(model(ids[part], mask[part]), score[part], kind[part]) * known_labels
            count += known_labels
        (total / count).backward()  # type: ignore[no-untyped-call]  # so in torch
        optimizer.step()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    tensors = {name: torch.from_numpy(value.copy()) for name, value in results[0].items()}
    model.load_state_dict(tensors, strict=True)
    for name, value in expected.items():
        torch.testing.assert_close(tensors[name], value, rtol=1e-9, atol=1e-11)


def _regrouped(found: Captured, graph: Any) -> Captured:
    data = encode_graph(graph)
    return replace(found, graph=graph, data=data, hash=graph_hash(data))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mask": np.zeros((12, 4), np.int8)}, "samples mask of 5, the data's are 4"),
        ({"ids": np.zeros((12, 5))}, "takes ids of int64, the data's are float64"),
    ],
)
def test_arrays_that_do_not_fit_the_model_are_reported(
    changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    _, found = captured()
    for name in ("train", "test"):
        np.savez(tmp_path / f"{name}.npz", **(arrays(12, 1) | changes))
    with pytest.raises(UsageError, match=words):
        bind_data(found.graph, load_folder(tmp_path), 3, "RUN.toml")


def test_a_missing_array_is_reported(tmp_path: Path) -> None:
    _, found = captured()
    for name in ("train", "test"):
        np.savez(tmp_path / f"{name}.npz", x=np.zeros((4, 5), int), y=np.zeros(4))
    with pytest.raises(UsageError, match="the model takes ids, mask, score, kind; the data has x, y"):
        bind_data(found.graph, load_folder(tmp_path), 3, "RUN.toml")


def test_parameter_groups_are_patterns_that_each_match_a_parameter() -> None:
    _, found = captured()
    graph = with_groups(found.graph, [("*.bias",), ("norm.*", "embed.*")])
    groups = {row.names[0]: row.group for row in graph.parameters}
    assert (groups["norm.bias"], groups["norm.weight"], groups["head.weight"]) == (1, 2, 0)
    with pytest.raises(ValueError, match=r"no parameter has a name like 'nothing.\*'"):
        with_groups(found.graph, [("nothing.*",)])
    settings = toml.parse(RUN, RunFile, name="RUN.toml").value.optimizer
    assert settings.groups == (GroupSettings(1.0, 0.2), GroupSettings(1.0, 0.0))


def test_a_graph_has_every_name_in_the_state_dict() -> None:
    model, found = captured()
    names = {name for row in found.graph.parameters for name in row.names}
    assert names == set(model.state_dict())


def test_epochs_are_converted_into_steps(tmp_path: Path) -> None:
    _, found = captured()
    data = load_folder(folder(tmp_path))  # 12 samples, 6 per step
    text = RUN.replace("steps = 3", "epochs = 2.5")
    assert text != RUN
    run_file = toml.parse(text, RunFile, name="RUN.toml").value
    wanted = make_manifest(run_file, found.graph, found.hash, data, name="RUN.toml", created=0.0)
    assert (wanted.steps, wanted.optimizer.schedule.total_steps) == (5, 5)
    both = toml.parse(text.replace("epochs", "steps = 9\nepochs"), RunFile, name="RUN.toml").value
    with pytest.raises(UsageError, match="give one of the two"):
        check_run_file(both, "RUN.toml")


def test_a_run_counts_only_its_validation_samples(tmp_path: Path) -> None:
    _, found = captured()
    np.savez(folder(tmp_path) / "validation.npz", **arrays(5, 3))
    data = load_folder(tmp_path)
    for mode in ("local", "exact"):
        text = RUN.replace("steps = 3", f'steps = 3\nmode = "{mode}"')
        run_file = toml.parse(text, RunFile, name="RUN.toml").value
        wanted = make_manifest(run_file, found.graph, found.hash, data, name="RUN.toml", created=0.0)
        assert (wanted.validation_samples, wanted.test_samples) == (5, 7)
        assert fits(data, wanted, found.graph)
    batches = make_batches(data, wanted, found.graph)
    np.testing.assert_array_equal(batches.validation(0)[0][0][:3], arrays(5, 3)["ids"][:3])
