"""The remedies that refusals of the corpus recommend, implemented so that each is known to work.

Each function permanently changes classes of transformers, as their author would, and is called only after the
unchanged model was refused. The changed model is a different model, so it does not count as captured.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


def _module(name: str) -> Any:
    return import_module(f"transformers.models.{name}.modeling_{name}")


class _Context:
    """Discards the tensors that a forward pass saves."""

    def save_for_backward(self, *_: Any) -> None: ...


def _plain(function: Any) -> Any:
    """Replace an autograd function by ordinary operators, using only its forward."""
    return SimpleNamespace(apply=lambda *arguments: function.forward(_Context(), *arguments))


def _all_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Apply every expert to every token, multiplied by its weight, which is zero if the expert is not
    chosen."""
    shares = torch.zeros(len(hidden_states), self.total_experts, dtype=hidden_states.dtype)
    shares = shares.scatter_add(1, top_k_index, top_k_weights.to(hidden_states.dtype))
    total = torch.zeros_like(hidden_states)
    for expert in range(self.total_experts):
        made = hidden_states
        if expert < self.num_routed_experts:
            gate, up = nn.functional.linear(hidden_states, self.gate_up_proj[expert]).chunk(2, -1)
            made = nn.functional.linear(self.act_fn(gate) * up, self.down_proj[expert])
        total = total + made * shares[:, expert : expert + 1]
    return total


def longcat_flash() -> None:
    """Sum all experts."""
    _module("longcat_flash").LongcatFlashExperts.forward = _all_experts


def jetmoe() -> None:
    """Sum all experts, also those in attention."""
    module = _module("jetmoe")

    def route(self: Any, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.layer(tokens).float()
        best, places = logits.topk(self.top_k, dim=1)
        return places, torch.softmax(best, 1).type_as(tokens), logits

    def each(layer: Any, tokens: Tensor) -> Tensor:
        return torch.einsum("ni,eoi->neo", tokens, layer.weight)

    def mixed(self: Any, layer_input: Tensor) -> Tensor:
        batch, length, width = layer_input.size()
        tokens = layer_input.reshape(-1, width)
        places, weights, _ = self.router(tokens)
        gate, up = each(self.input_linear, tokens).chunk(2, -1)
        made = torch.einsum("nei,eoi->neo", self.activation(gate) * up, self.output_linear.weight)
        shares = torch.zeros(len(tokens), self.router.num_experts, dtype=tokens.dtype)
        shares = shares.scatter(1, places, weights)
        out: Tensor = (made * shares[..., None]).sum(1).view(batch, length, -1) + self.bias
        return out

    def spread(self: Any, layer_input: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        batch, length, width = layer_input.size()
        places, weights, logits = self.router(layer_input.reshape(-1, width))
        made = each(self.input_linear, layer_input.reshape(-1, width))
        made = made.gather(1, places[..., None].expand(-1, -1, self.hidden_size))
        return made.view(batch, length, self.top_k, -1), logits, (places, weights)

    def gathered(self: Any, layer_input: Tensor, found: tuple[Tensor, Tensor]) -> Tensor:
        batch, length, count, width = layer_input.size()
        weights = self.output_linear.weight[found[0]]
        made = torch.einsum("nki,nkoi->nko", layer_input.reshape(-1, count, width), weights)
        out: Tensor = (made * found[1][..., None]).sum(1).view(batch, length, -1) + self.bias
        return out

    module.JetMoeTopKGating.forward, module.JetMoeMoE.forward = route, mixed
    module.JetMoeMoA.map, module.JetMoeMoA.reduce = spread, gathered


def xmod() -> None:
    """Run every language's adapter, and select its rows by a mask."""

    def adapted(self: Any, lang_ids: Tensor, hidden_states: Tensor) -> Tensor:
        before = hidden_states
        if self.adapter_layer_norm is not None:
            hidden_states = self.adapter_layer_norm(hidden_states)
        elif self.adapter_reuse_layer_norm:
            hidden_states = self.LayerNorm(hidden_states)
        kept = hidden_states if self.ln_before_adapter else before
        total = torch.zeros_like(hidden_states)
        for place, adapter in enumerate(self.adapter_modules.values()):
            total = torch.where((lang_ids == place)[:, None, None], adapter(hidden_states), total)
        made: Tensor = self.dropout(total) + kept
        return made

    _module("xmod").XmodOutput.lang_adapter = adapted


def phimoe() -> None:
    """Leave the backward pass to autograd."""
    module = _module("phimoe")
    module.PhimoeMultiplier = _plain(module.PhimoeMultiplier)


def yoso() -> None:
    """Leave the backward pass to autograd."""
    module = _module("yoso")
    module.YosoCumulation = _plain(module.YosoCumulation)


def fsmt() -> None:
    """Always use a padding mask, even without padding."""
    _module("fsmt").make_padding_mask = lambda ids, padding_idx=1: ids.eq(padding_idx)


def ibert() -> None:
    """Do not check whether activations are finite; evaluation keeps them unchanged."""
    module = import_module("transformers.models.ibert.quant_modules")
    forward = module.QuantAct.forward

    def unwatched(self: Any, *arguments: Any, **keywords: Any) -> Any:
        was, self.training = self.training, False
        try:
            return forward(self, *arguments, **keywords)
        finally:
            self.training = was

    module.QuantAct.forward = unwatched


REWRITTEN: Mapping[str, Callable[[], None]] = MappingProxyType(
    {each.__name__: each for each in (fsmt, ibert, jetmoe, longcat_flash, phimoe, xmod, yoso)}
)
"""The remedies by the name of the architecture."""
