"""Models without values: parameters are on meta, and their initialisation is a recipe that makes the same
draws."""

import copy
import threading
import warnings
from collections.abc import Callable
from math import sqrt
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from partition.capture.models.gpt import GPT, GPTConfiguration
from partition.capture.skeleton import recipe_of, skeleton, unrecorded
from partition.execute.values import first_values
from partition.model.graph import RECIPE_STEPS_MAX, FillStep, Parameter, Recipe, TensorType


def drawn(parameter: nn.Parameter, name: str) -> torch.Tensor:
    """Return the values that a stage would draw for a parameter."""
    recipe = recipe_of(parameter)
    assert recipe is not None
    out = torch.empty(parameter.shape, dtype=torch.float64)
    row = Parameter((name,), TensorType("float64", tuple(parameter.shape)), "parameter", recipe)
    first_values(row, 1, torch.float64, out)
    return out


def deviation_error(count: int) -> float:
    """Relative tolerance: five standard errors of a deviation."""
    return 5 / sqrt(2 * count)


def assert_drawn_as_it_initialises(build: Callable[[], nn.Module]) -> None:
    """Check that every recipe has the mean, the spread and the range of the module's real initialisation."""
    torch.manual_seed(0)
    real = build()
    with skeleton():
        outlined = build()
    assert unrecorded(outlined) == ()
    parameters = dict(outlined.named_parameters())
    assert [name for name, _ in real.named_parameters()] == list(parameters)
    for name, parameter in real.named_parameters():
        assert parameters[name].is_meta
        assert parameters[name].shape == parameter.shape
        assert parameters[name].dtype == parameter.dtype
        assert parameters[name].requires_grad == parameter.requires_grad
        one, other = parameter.detach().double(), drawn(parameters[name], name)
        spread, count = float(other.std(correction=0)), other.numel()
        if spread == 0:
            assert torch.allclose(one, other), name
            continue
        assert abs(float(one.mean() - other.mean())) < 8 * spread / sqrt(count), name
        assert float(one.std(correction=0)) == pytest.approx(spread, rel=2 * deviation_error(count)), name
        rows = [tensor.flatten(1).abs().sum(1) == 0 for tensor in (one, other) if tensor.dim() > 1]
        assert not rows or torch.equal(*rows), name
        recipe = recipe_of(parameters[name])
        assert recipe is not None
        if recipe.steps[0].kind == "uniform" and len(recipe.steps) == 1:
            low, high = recipe.steps[0].first, recipe.steps[0].second
            rounding = 1e-7 * (high - low)
            assert low - rounding <= float(one.min()) <= float(one.max()) <= high + rounding, name
            assert float(one.max() - one.min()) > (high - low) * (1 - 20 / count), name


def steps(parameter: torch.Tensor) -> tuple[FillStep, ...]:
    recipe = recipe_of(parameter)
    assert recipe is not None
    return recipe.steps


class Defaults(nn.Module):
    """The layers whose own initialisation matters most."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.transposed = nn.ConvTranspose1d(4, 8, 5)
        self.linear = nn.Linear(40, 50)
        self.bilinear = nn.Bilinear(8, 9, 10)
        self.embedding = nn.Embedding(30, 20, padding_idx=7)
        self.norm = nn.BatchNorm2d(16)
        self.layer_norm = nn.LayerNorm(12)
        self.group_norm = nn.GroupNorm(2, 8)
        self.recurrent = nn.LSTM(12, 10, num_layers=2, bidirectional=True)
        self.attention = nn.MultiheadAttention(24, 4, kdim=10, vdim=12)
        self.slope = nn.PReLU()


def test_torchs_own_layers_are_drawn_as_torch_initialises_them() -> None:
    assert_drawn_as_it_initialises(Defaults)


def test_a_linear_layers_bounds_equal_torchs_bit_for_bit() -> None:
    with skeleton():
        layer = nn.Linear(48, 5)
    bound = sqrt(2 / (1 + sqrt(5) ** 2)) / sqrt(48) * sqrt(3)
    assert steps(layer.weight) == (FillStep("uniform", -bound, bound),)
    assert steps(layer.bias)[0].second == pytest.approx(1 / sqrt(48), rel=1e-15)


def test_layers_that_are_deep_copied_by_a_constructor_keep_their_recipes() -> None:
    layer: dict[str, Any] = {"d_model": 16, "nhead": 2, "dim_feedforward": 32, "batch_first": True}
    assert_drawn_as_it_initialises(
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(**layer), num_layers=2, enable_nested_tensor=False
        )
    )


def test_a_gpt_has_gpt2s_initialisation_and_its_tie() -> None:
    def build() -> GPT:
        return GPT(GPTConfiguration(vocabulary=70, block=16, layers=3, heads=2, width=32))

    assert_drawn_as_it_initialises(build)
    with skeleton():
        model = build()
    assert model.lm_head.weight is model.transformer.wte.weight
    parameters = dict(model.named_parameters())
    assert steps(parameters["transformer.h.0.attn.c_proj.weight"]) == (
        FillStep("normal", 0.0, 0.02 / sqrt(6)),
    )
    assert steps(parameters["transformer.h.0.attn.c_attn.weight"]) == (FillStep("normal", 0.0, 0.02),)
    assert steps(parameters["transformer.h.0.attn.c_attn.bias"]) == (FillStep("constant", 0.0),)


SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


@pytest.mark.parametrize(
    "build",
    [
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=90, n_positions=16)
        ),
        lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**SMALL, num_key_value_heads=1, vocab_size=90, pad_token_id=3)
        ),
        lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, vocab_size=90)),
        lambda: transformers.ViTForImageClassification(
            transformers.ViTConfig(**SMALL, image_size=16, patch_size=4)
        ),
    ],
    ids=["gpt2", "llama", "bert", "vit"],
)
def test_models_of_transformers_have_their_own_initialisation(build: Callable[[], nn.Module]) -> None:
    assert_drawn_as_it_initialises(build)


def test_buffers_keep_their_values() -> None:
    with skeleton():
        norm = nn.BatchNorm1d(3)
        llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, vocab_size=90))
    assert norm.running_var is not None
    assert norm.running_var.tolist() == [1, 1, 1]
    frequencies = llama.model.rotary_emb.inv_freq
    assert frequencies.device.type == "cpu"
    assert frequencies[0] == 1


def test_a_model_too_large_for_any_machine_takes_no_memory() -> None:
    with skeleton():
        layer = nn.Linear(1_000_000, 1_000_000)  # 4 TB
        embedding = nn.Embedding(1_000_000, 100_000)
    assert layer.weight.is_meta
    assert layer.weight.numel() == 10**12
    assert steps(embedding.weight) == (FillStep("normal", 0.0, 1.0),)


def test_initialisation_is_recorded_before_and_after_registration() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            early = torch.empty(4, 5)
            nn.init.uniform_(early, -2, 3)
            self.early = nn.Parameter(early)
            self.late = nn.Parameter(torch.Tensor(4, 5))
            self.late.data.normal_(1.0, 0.5)
            held = nn.Parameter(torch.empty(6))
            self.held = held
            with torch.no_grad():
                held.fill_(2.0)  # through the tensor that was registered

    with skeleton():
        model = Both()
    assert steps(model.early) == (FillStep("uniform", -2.0, 3.0),)
    assert steps(model.late) == (FillStep("normal", 1.0, 0.5),)
    assert steps(model.held) == (FillStep("constant", 2.0),)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: torch.zeros(3, 2), (FillStep("constant", 0.0),)),
        (lambda: torch.ones(3, 2) * 1e-6, (FillStep("constant", 1.0), FillStep("multiply", 1e-6))),
        (lambda: torch.full((3, 2), 7.0), (FillStep("constant", 7.0),)),
        (
            lambda: torch.randn(3, 2) * 0.5 + 1,
            (FillStep("normal", 0.0, 1.0), FillStep("multiply", 0.5), FillStep("add", 1.0)),
        ),
        (lambda: torch.rand(3, 2) - 0.5, (FillStep("uniform", 0.0, 1.0), FillStep("add", -0.5))),
        (
            lambda: -torch.rand(3, 2) / 4,
            (FillStep("uniform", 0.0, 1.0), FillStep("multiply", -1.0), FillStep("multiply", 0.25)),
        ),
        (lambda: torch.normal(2.0, 3.0, (3, 2)), (FillStep("normal", 2.0, 3.0),)),
        (lambda: torch.tensor([[2.5, 2.5]]), (FillStep("constant", 2.5),)),
        (
            lambda: torch.randn(3, 2).clamp_(-1, 1),
            (FillStep("normal", 0.0, 1.0), FillStep("clamp", -1.0, 1.0)),
        ),
    ],
)
def test_tensors_made_by_factories_are_recorded(
    make: Callable[[], torch.Tensor], expected: tuple[FillStep, ...]
) -> None:
    with skeleton():
        module = nn.Module()
        module.weight = nn.Parameter(make())
    assert steps(module.weight) == expected


def test_a_fill_replaces_earlier_recipes_but_a_zeroed_row_does_not() -> None:
    with skeleton():
        layer = nn.Linear(4, 3)
        with torch.no_grad():
            layer.weight.mul_(2).sub_(1)
            layer.weight[1] = 0
        other = nn.Linear(4, 3)
        nn.init.zeros_(other.weight)
    first, *rest = steps(layer.weight)
    assert first.kind == "uniform"
    assert rest == [FillStep("multiply", 2.0), FillStep("add", -1.0), FillStep("zero_row", 1.0)]
    assert steps(other.weight) == (FillStep("constant", 0.0),)


def test_a_truncated_normal_is_recorded_despite_torchs_rejection_sampling() -> None:
    class Truncated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(200, 100))
            nn.init.trunc_normal_(self.weight, mean=0.5, std=0.4, a=0.0, b=1.2)

    assert_drawn_as_it_initialises(Truncated)
    with skeleton():
        values = drawn(Truncated().weight, "weight")
    assert 0 <= float(values.min()) < 0.01
    assert 1.19 < float(values.max()) <= 1.2


def orthogonal(layer: nn.Linear) -> None:
    nn.init.orthogonal_(layer.weight)


def sparse(layer: nn.Linear) -> None:
    nn.init.sparse_(layer.weight, 0.5)


def loaded(layer: nn.Linear) -> None:
    values = {"weight": torch.arange(20.0).view(4, 5), "bias": torch.zeros(4)}
    layer.load_state_dict(values, assign=True)


def copied(layer: nn.Linear) -> None:
    layer.weight.data.copy_(torch.arange(20.0).view(4, 5))


def partial(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight[1:3].fill_(1.0)


def one_row_of_ones(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight[1] = 1


def computed(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(torch.linspace(0, 1, 20).view(4, 5))


def exponential(layer: nn.Linear) -> None:
    layer.weight.data.exponential_()


def never(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(torch.empty(4, 5))


def identity(layer: nn.Linear) -> None:
    nn.init.eye_(layer.weight)


def many_steps(layer: nn.Linear) -> None:
    with torch.no_grad():
        for _ in range(RECIPE_STEPS_MAX):
            layer.weight.mul_(1.5)


@pytest.mark.parametrize(
    "spoil",
    [
        orthogonal,
        sparse,
        loaded,
        copied,
        partial,
        one_row_of_ones,
        computed,
        exponential,
        never,
        identity,
        many_steps,
    ],
)
def test_unknown_initialisation_is_reported_and_never_guessed(spoil: Callable[[nn.Linear], None]) -> None:
    with skeleton():
        layer = nn.Linear(5, 4)
        spoil(layer)
        again = nn.Linear(5, 4)
        spoil(again)
        nn.init.ones_(again.weight)
    assert recipe_of(layer.weight) is None
    [(name, reason)] = unrecorded(layer)
    assert name == "weight"
    assert len(reason) > 10
    # A later fill of the whole tensor makes it known again.
    assert steps(again.weight) == (FillStep("constant", 1.0),)


def test_ties_are_kept() -> None:
    with skeleton():
        one, other = nn.Linear(4, 4), nn.Linear(4, 4)
        other.weight = one.weight
        shared = nn.Parameter(torch.zeros(3))
        module = nn.Module()
        module.first = shared
        module.second = shared
    assert other.weight is one.weight
    assert module.first is module.second


def test_recipes_survive_a_change_of_type_inside_and_after() -> None:
    with skeleton():
        inside = nn.Linear(4, 4).double()
        nn.init.ones_(inside.bias)
        after = nn.Linear(4, 4)
    after.double()
    assert after.weight.dtype == torch.float64
    assert steps(after.weight) == steps(inside.weight)
    assert steps(inside.bias) == (FillStep("constant", 1.0),)


def test_a_skeleton_restores_everything_even_if_the_constructor_raises() -> None:
    register, deepcopy = nn.Module.register_parameter, nn.Parameter.__deepcopy__
    truncated = nn.init._no_grad_trunc_normal_
    with pytest.raises(RuntimeError, match="of the model"), skeleton():
        raise RuntimeError("of the model")
    assert nn.Module.register_parameter is register
    assert nn.Parameter.__deepcopy__ is deepcopy
    assert nn.init._no_grad_trunc_normal_ is truncated
    layer = nn.Linear(2, 2)
    assert not layer.weight.is_meta
    assert recipe_of(layer.weight) is None
    assert unrecorded(layer) == ()
    assert recipe_of(copy.deepcopy(layer).weight) is None


def test_other_threads_build_real_modules_meanwhile() -> None:
    made: list[nn.Linear] = []
    with skeleton():
        thread = threading.Thread(target=lambda: made.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
        mine = nn.Linear(2, 2)
    assert not made[0].weight.is_meta
    assert mine.weight.is_meta


def test_nested_skeletons_act_as_one() -> None:
    with skeleton():
        with skeleton():
            inner = nn.Linear(2, 2)
        outer = nn.Linear(2, 2)
    assert steps(inner.bias) == steps(outer.bias)


def test_a_parameter_moved_to_meta_by_hand_has_no_recipe() -> None:
    layer = nn.Linear(2, 2, device="meta")
    assert recipe_of(layer.weight) is None
    assert [name for name, _ in unrecorded(layer)] == ["weight", "bias"]


def test_lazy_and_integer_parameters_are_left_alone() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with skeleton():
            waiting = nn.LazyLinear(3)
            module = nn.Module()
            module.index = nn.Parameter(torch.tensor([3, 4]), requires_grad=False)
    assert isinstance(waiting.weight, nn.UninitializedParameter)
    assert module.index.tolist() == [3, 4]


def test_a_recipe_is_data() -> None:
    with skeleton():
        layer = nn.Linear(2, 2)
    assert isinstance(recipe_of(layer.weight), Recipe)
