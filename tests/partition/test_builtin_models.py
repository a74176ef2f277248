"""The built-in models, a user's own file, and the weights stored next to a graph."""

import textwrap
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from msgspec import structs
from torch import nn

from crypto.errors import RemoteProtocolError
from partition.capture import Captured, CaptureRefused, Task, capture, skeleton
from partition.capture.models import BUILTIN
from partition.capture.models.gpt import GPT, GPTConfiguration
from partition.capture.models.resnet18 import ResNet18
from partition.capture.proof import prove
from partition.capture.task import capture_task, load_factory, prove_task, task_of
from partition.capture.weights import StoredFile, write_weights
from partition.model.graph import Parameter, Recipe, StoredValues
from partition.model.safetensors_layout import check_range, file_bytes, file_header, stored_parameters
from partition.model.sizes import shape_of

TINY: dict[str, Any] = {"layers": 1, "heads": 2, "width": 16, "dropout": 0.1}
MODELS: dict[str, tuple[tuple[int, ...], int, dict[str, Any]]] = {
    "simple-cnn": ((1, 8, 8), 10, {}),
    "resnet18": ((3, 16, 16), 10, {}),
    "gpt": ((8,), 30, {**TINY, "cache_rows": 3}),
}


@cache
def built(name: str) -> tuple[Task, Captured]:
    """Return a built-in model that was captured without memory for its values."""
    shape, classes, options = MODELS[name]
    with skeleton():
        task = BUILTIN[name](shape, classes, **options)
    return task, capture_task(task)


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_a_builtin_model_is_captured_without_memory_and_proved(name: str) -> None:
    task, captured = built(name)
    assert captured.graph.name == name
    assert captured.unused == ()
    held = sum(parameter.numel() for parameter in task.model.parameters())
    rows = captured.graph.parameters
    assert sum(prod(shape_of(row.type, ())) for row in rows if row.kind == "parameter") == held
    # Only tensors without a recipe are stored.
    assert all(isinstance(row.source, Recipe) for row in rows)
    proof = prove_task(task, captured)
    assert proof.gradients == len(list(task.model.parameters()))
    assert proof.materialised_bytes < 4 * held
    # Models are cut between layers. A model with this many blocks has at least as many layers.
    assert len(captured.graph.layers) >= 3


def test_simple_cnn_has_the_original_projects_names_and_size() -> None:
    task = BUILTIN["simple-cnn"]((3, 32, 32), 10)
    names = [f"{layer}.{part}" for layer in SEED_LAYERS for part in ("weight", "bias")]
    assert list(task.model.state_dict()) == names
    assert sum(parameter.numel() for parameter in task.model.parameters()) == 1_147_466


SEED_LAYERS = ("conv1", "conv2", "conv3", "fc1", "fc2")


def test_resnet18_has_torchvisions_names_and_size() -> None:
    model = ResNet18(3, 1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_689_512
    names = list(model.state_dict())
    assert len(names) == 122
    assert names[:7] == ["conv1.weight", *(f"bn1.{part}" for part in NORM), "layer1.0.conv1.weight"]
    assert "layer2.0.downsample.0.weight" in names
    assert "layer2.0.downsample.1.running_var" in names
    assert names[-2:] == ["fc.weight", "fc.bias"]
    assert model.conv1.weight.shape == (64, 3, 7, 7)
    assert model(torch.zeros(1, 3, 64, 64)).shape == (1, 1000)


NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def test_resnet18_uses_a_small_stem_for_small_images() -> None:
    small, large = (BUILTIN["resnet18"]((3, side, side), 10).model for side in (32, 64))
    assert small.get_parameter("conv1.weight").shape == (64, 3, 3, 3)
    assert large.get_parameter("conv1.weight").shape == (64, 3, 7, 7)


def test_gpt_has_nanogpts_names_and_gpt2s_size() -> None:
    with skeleton():
        model = BUILTIN["gpt"]((1024,), 50257).model
    assert sum(parameter.numel() for parameter in model.parameters()) == 124_439_808
    names = [name for name, _ in model.named_parameters()]
    assert names[:3] == ["transformer.wte.weight", "transformer.wpe.weight", "transformer.h.0.ln_1.weight"]
    assert "transformer.h.11.attn.c_attn.weight" in names
    assert "transformer.h.11.mlp.c_proj.bias" in names
    assert names[-1] == "transformer.ln_f.bias"


def test_gpt_decodes_rows_of_different_lengths_like_single_rows() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfiguration(vocabulary=30, block=8, layers=2, heads=2, width=16, cache_rows=4)).eval()
    long, short = torch.randint(30, (7,)), torch.randint(30, (4,))
    with torch.no_grad():
        whole = [model(tokens.unsqueeze(0))[0] for tokens in (long, short)]
        rows = torch.tensor([3, 1])
        # Prompts of 5 and 2 tokens; the second is padded. Then one token at a time, with a separate position
        # for each row.
        prompts = torch.stack([long[:5], torch.cat([short[:2], torch.zeros(3, dtype=torch.int64)])])
        first = model.decode(prompts, rows, torch.tensor([0, 0]))
        assert torch.allclose(first[0], whole[0][:5], atol=1e-6)
        assert torch.allclose(first[1, :2], whole[1][:2], atol=1e-6)
        for step in range(2):
            tokens = torch.stack([long[5 + step : 6 + step], short[2 + step : 3 + step]])
            logits = model.decode(tokens, rows, torch.tensor([5 + step, 2 + step]))
            assert torch.allclose(logits[0, 0], whole[0][5 + step], atol=1e-6)
            assert torch.allclose(logits[1, 0], whole[1][2 + step], atol=1e-6)
        # A used row can be reset alone and in any order.
        again = model.decode(short[:4].unsqueeze(0), torch.tensor([3]), torch.tensor([0]))
        assert torch.allclose(again[0], whole[1], atol=1e-6)


def test_a_gpts_cache_is_a_state_and_its_entry_point_is_proved() -> None:
    task, captured = built("gpt")
    cached = [f"transformer.h.0.attn.cache_{kind}" for kind in ("keys", "values")]
    assert [state.name for state in captured.graph.states] == cached
    assert prove_task(task, captured).entries == ("train", "decode")
    # An update of the wrong cache is detected.
    entry = captured.graph.entry("decode")
    (one, first), (other, second) = entry.updates
    tampered = structs.replace(entry, updates=((one, second), (other, first)))
    entries = tuple(tampered if each is entry else each for each in captured.graph.entries)
    wrong = replace(captured, graph=structs.replace(captured.graph, entries=entries))
    with pytest.raises(CaptureRefused, match=r"the state 'transformer.h.0.attn.cache_keys' differs"):
        prove_task(task, wrong)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("simple-cnn", (3, 7, 8)),
        ("simple-cnn", (8, 8)),
        ("resnet18", (3, 7, 7)),
        ("resnet18", (64,)),
        ("gpt", (3, 8, 8)),
        ("gpt", (0,)),
    ],
)
def test_samples_of_the_wrong_shape_for_a_builtin_are_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"not .*shape|at least 1"):
        BUILTIN[name](shape, 10)


def test_invalid_options_of_gpt_are_refused() -> None:
    for options in ({"heads": 5, "width": 16}, {"dropout": 1.0}, {"layers": 0}, {"cache_rows": -1}):
        with pytest.raises(ValueError, match=r"heads|dropout|at least"):
            BUILTIN["gpt"]((8,), 30, **options)


# A user's own file


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.py"
    path.write_text(textwrap.dedent(text))
    return path


def test_a_task_comes_from_a_users_file_and_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "beside_mine.py").write_text("WIDTH = 3\n")
    path = written(
        tmp_path,
        """
        import torch
        from dataclasses import dataclass
        from torch import nn
        from beside_mine import WIDTH
        from partition.capture import Task

        @dataclass
        class Options:
            width: int = WIDTH

        def build(width: int = Options().width) -> Task:
            return Task(nn.Linear(4, width), (torch.zeros(2, 4),), name="mine")

        def pair():
            return nn.Linear(4, 2), torch.zeros(2, 4)
        """,
    )
    task = task_of(load_factory(f"{path}:build"), width=5)
    assert task.model.get_parameter("weight").shape == (5, 4)
    assert task_of(load_factory(f"{path}:build")).model.get_parameter("weight").shape == (3, 4)
    assert capture_task(task).graph.name == "mine"
    plain = task_of(load_factory(f"{path}:pair"))
    assert prove_task(plain, capture_task(plain, name="pair")).entries == ("forward",)


@pytest.mark.parametrize(
    ("text", "reference", "reason"),
    [
        ("", "mine.py", "form PATH.py:function"),
        ("", "mine:build", "form PATH.py:function"),
        ("", "other.py:build", "no file"),
        ("def built(): pass", "mine.py:build", "no function 'build'; it has built"),
        ("build = 3", "mine.py:build", "no function 'build'"),
        ("import nothing_of_this_name", "mine.py:build", "ModuleNotFoundError"),
        ("def build(:", "mine.py:build", "SyntaxError"),
    ],
)
def test_a_file_without_a_factory_is_refused_with_the_reason(
    tmp_path: Path, text: str, reference: str, reason: str
) -> None:
    written(tmp_path, text)
    with pytest.raises(CaptureRefused, match=reason):
        load_factory(f"{tmp_path}/{reference}")


@pytest.mark.parametrize(
    ("factory", "reason"),
    [
        (lambda: 3, "returned a int"),
        (lambda: nn.Linear(2, 2), "returned a Linear"),
        (lambda: Task(3, ()), "model is a int"),  # type: ignore[arg-type]  # on purpose
        (lambda: 1 / 0, "ZeroDivisionError"),
        (lambda width: width, "TypeError"),
    ],
)
def test_a_factory_without_a_task_is_refused_with_the_reason(
    factory: Callable[..., Any], reason: str
) -> None:
    with pytest.raises(CaptureRefused, match=reason):
        task_of(factory)


# Weights


@cache
def trained() -> tuple[nn.Module, Captured]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False))
    return model, capture(model, (torch.zeros(2, 5),), name="trained")


def test_weights_are_a_standard_safetensors_file(tmp_path: Path) -> None:
    model, captured = trained()
    path = tmp_path / "model.safetensors"
    assert write_weights(path, captured) == path.stat().st_size == file_bytes(captured.graph)
    with safetensors.safe_open(path, framework="pt") as file:
        assert sorted(file.keys()) == sorted(model.state_dict())
        assert all(torch.equal(file.get_tensor(name), value) for name, value in model.state_dict().items())
    assert list(tmp_path.iterdir()) == [path]


def test_ranges_are_read_one_by_one_and_checked(tmp_path: Path) -> None:
    model, captured = trained()
    path = tmp_path / "model.safetensors"
    write_weights(path, captured)
    with StoredFile(path, captured.graph) as file:
        found = dict(file.all())
    for name, value in model.state_dict().items():
        assert found[name] == value.numpy().tobytes()


def source(row: Parameter) -> StoredValues:
    assert isinstance(row.source, StoredValues)
    return row.source


@pytest.mark.parametrize("spoiled", ["truncated", "longer", "header", "empty"])
def test_a_file_with_another_length_or_header_is_not_opened(tmp_path: Path, spoiled: str) -> None:
    _, captured = trained()
    path = tmp_path / "model.safetensors"
    write_weights(path, captured)
    data = bytearray(path.read_bytes())
    match spoiled:
        case "truncated":
            del data[-1:]
        case "longer":
            data += b"\0"
        case "header":
            place = data.index(b"F32")
            data[place : place + 3] = b"I32"
        case _:
            data.clear()
    path.write_bytes(data)
    with pytest.raises(RemoteProtocolError, match=r"bytes, but|header"):
        StoredFile(path, captured.graph)


def test_a_changed_value_is_detected_when_read(tmp_path: Path) -> None:
    _, captured = trained()
    path = tmp_path / "model.safetensors"
    write_weights(path, captured)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    *others, last = stored_parameters(captured.graph)
    with StoredFile(path, captured.graph) as file:
        for row in others:
            file.read(source(row))
        with pytest.raises(RemoteProtocolError, match="digest"):
            file.read(source(last))
    with pytest.raises(RemoteProtocolError, match="bytes of stored values"):
        check_range(source(last), b"")


def test_weights_that_changed_since_the_capture_are_not_written(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    captured = capture(model, (torch.zeros(2, 3),))
    with torch.no_grad():
        model.weight.add_(1)
    with pytest.raises(CaptureRefused, match="changed since"):
        write_weights(tmp_path / "model.safetensors", captured)
    assert list(tmp_path.iterdir()) == []


def test_ranges_with_gaps_or_overlaps_have_no_file() -> None:
    _, captured = trained()
    for shift in (-4, 4):
        rows = list(captured.graph.parameters)
        moved = source(rows[-1])
        rows[-1] = structs.replace(rows[-1], source=structs.replace(moved, offset=moved.offset + shift))
        with pytest.raises(RemoteProtocolError, match="do not directly follow"):
            file_header(structs.replace(captured.graph, parameters=tuple(rows)))


def test_a_model_with_only_recipes_has_a_file_without_data(tmp_path: Path) -> None:
    with skeleton():
        model = nn.Linear(3, 2)
    captured = capture(model, (torch.zeros(2, 3),))
    path = tmp_path / "model.safetensors"
    assert write_weights(path, captured) == len(file_header(captured.graph))
    with StoredFile(path, captured.graph) as file:
        assert list(file.all()) == []
    assert prove(model, captured, (torch.zeros(2, 3),)).gradients == 2
