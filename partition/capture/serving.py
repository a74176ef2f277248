"""A language model of transformers as a graph that serves it (`partition.model.serving`).

The model's own code is captured, with its attention replaced by the single operator `attend` through
transformers' own interface, and without mask and cache: the sessions of tokens and their positions are given
outside the graph. The model is unchanged afterwards, and so are other models with the same configuration
object.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from partition.capture.capture import Captured, Through, capture
from partition.capture.errors import CaptureRefused
from partition.capture.hugging_face import COUNT_FROM_PADDING, folder_encoder, folder_task, is_encoder
from partition.capture.serving_proof import prove_encoder_served, prove_folder_served
from partition.capture.wrapper_module import BATCH
from partition.execute.attention import ATTEND, WHOLE
from partition.model.graph import SERVE, Graph, Size
from partition.model.serving import ROWS_MAX, TOKENS_MAX, Sizes, frozen, serving_symbols
from partition.serve.messages import UNIT_TOKENS_MAX

_NAME = "peerloom"
"""The name of our attention among those of transformers."""
_WHOLE_NAME = "peerloom_whole"
_FIRST_ALONE = 1e4
"""A score so high that exp(0) vanishes compared with it, in float64 too."""
_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length")
CONTEXT_USUAL = 2_048
"""Maximum length of a session, if the model does not state the length of its texts."""


def capture_folder_for_serving(folder: Path) -> Captured:
    """Capture the language model in a folder that transformers' `save_pretrained` has written, with its
    weights in their stored types, and prove that the graph answers like the model.

    Raises:
        CaptureRefused: the model is not known here, or cannot be served.
    """
    if is_encoder(folder):
        return capture_encoder(*folder_encoder(folder))
    model = folder_task(folder, as_stored=True).model
    found = capture_for_serving(model)
    prove_folder_served(model, found.graph)
    return found


def capture_for_serving(model: nn.Module) -> Captured:
    """Capture a causal language model of transformers.

    Raises:
        CaptureRefused: the model is of a different kind, or cannot be served; the text says why.
    """
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_output_embeddings"):
        raise CaptureRefused("only a language model of transformers can be captured to be served")
    context = next((int(most) for name in _LENGTHS if (most := getattr(config, name, None))), CONTEXT_USUAL)
    examples = tuple(torch.zeros(size, dtype=torch.int64) for size in (5, 5, 3))
    was_training = model.training
    model.eval()
    try:
        with _attending(model):
            return capture(
                model,
                examples,
                dynamic={BATCH: (1, TOKENS_MAX, {0: 0, 1: 0}), "rows": (1, ROWS_MAX, {2: 0})},
                through=Through(SERVE, _serve, partial(_served, context=context)),
                name=type(model).__name__,
            )
    finally:
        model.train(was_training)


def capture_encoder(model: nn.Module, pooling: str) -> Captured:
    """Capture an encoder of transformers, whose answer to a text is one vector: the mean of its tokens'
    vectors, or the first one ("cls"). A text comes as one unit, and each of its rows is the vector.

    Raises:
        CaptureRefused: the model is of a different kind, or the graph differs from it.
    """
    config: Any = getattr(model, "config", None)
    if config is None or getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False):
        raise CaptureRefused("only an encoder of transformers can be captured to make vectors of texts")
    first = first_position(model)
    context = next((int(most) for name in _LENGTHS if (most := getattr(config, name, None))), CONTEXT_USUAL)
    examples = tuple(torch.zeros(size, dtype=torch.int64) for size in (5, 5, 3))
    with _attending(model, _WHOLE_NAME):
        found = capture(
            model.eval(),
            examples,
            dynamic={BATCH: (1, TOKENS_MAX, {0: 0, 1: 0}), "rows": (1, ROWS_MAX, {2: 0})},
            through=Through(
                SERVE,
                partial(_encode, pooling=pooling, first=first),
                partial(_served, context=min(context - first, UNIT_TOKENS_MAX)),
            ),
            name=type(model).__name__,
        )
    prove_encoder_served(model, found.graph, partial(pooled, pooling=pooling))
    return found


def first_position(model: nn.Module) -> int:
    """Return the number of a text's first position: RoBERTa and similar models begin to count after their
    padding."""
    is_kin = type(model).__name__.startswith(COUNT_FROM_PADDING)
    return int(getattr(getattr(model, "config", None), "pad_token_id", 0) or 0) + 1 if is_kin else 0


def pooled(hidden: Tensor, pooling: str) -> Tensor:
    """Return the vector for the tokens of one text, [tokens, width]."""
    return hidden[0] if pooling == "cls" else hidden.mean(0)


def _encode(
    model: Any, tokens: Tensor, positions: Tensor, rows: Tensor, *, pooling: str, first: int
) -> Tensor:
    ids = tokens.unsqueeze(0)
    hidden = model(input_ids=ids, position_ids=positions.unsqueeze(0) + first).last_hidden_state
    # Pooling is done by attention, because it knows which tokens belong to a text. Equal scores give the
    # mean; a score compared with which all others vanish selects the first token.
    value = hidden.unsqueeze(1)
    ones = (positions >= 0).to(value.dtype).view(1, 1, -1, 1)
    key = ones if pooling == "mean" else (positions == 0).to(value.dtype).view(1, 1, -1, 1)
    scale = 1.0 if pooling == "mean" else _FIRST_ALONE
    layers = sum(1 for module in model.modules() if hasattr(module, "is_causal"))
    vectors: Tensor = ATTEND(ones, key, value, layers, scale, WHOLE)[0, 0]
    return vectors.index_select(0, rows)


def _serve(model: Any, tokens: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
    output = model(
        input_ids=tokens.unsqueeze(0),
        position_ids=positions.unsqueeze(0),
        use_cache=False,
        logits_to_keep=rows,
    )
    logits: Tensor = output.logits[0]
    # Gateways sample tokens from float32.
    return logits.float() if logits.element_size() < torch.float32.itemsize else logits


def _served(graph: Graph, context: int) -> Graph:
    """Return the graph with the sizes of a served one, and without gradients."""
    sizes = Sizes(graph.expressions, {0: Size(0), 1: Size(1)})
    entries = tuple(
        msgspec.structs.replace(
            entry,
            nodes=tuple(sizes.node(node) for node in entry.nodes),
        )
        for entry in graph.entries
    )
    return msgspec.structs.replace(
        graph,
        symbols=serving_symbols(context),
        expressions=tuple(sizes.rows),
        types=tuple(sizes.kind(kind) for kind in graph.types),
        parameters=tuple(frozen(row) for row in graph.parameters),
        entries=entries,
    )


@contextmanager
def _attending(model: nn.Module, name: str = _NAME) -> Iterator[None]:
    """Make the model use our attention operator while it is captured."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    layers = [module for module in model.modules() if hasattr(module, "is_causal")]
    attention = _attention if name == _NAME else partial(_whole_attention, layers=layers)
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, _no_mask)
    held: list[tuple[Any, Any]] = []
    seen: set[int] = set()
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation") and id(config) not in seen:
            seen.add(id(config))
            held.append((config, config._attn_implementation))
    experts = [
        (config, config._experts_implementation)
        for config, _ in held
        if getattr(config, "_experts_implementation", None) is not None
    ]
    # Without gradients, so that no node needs to say that it has none.
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        model.requires_grad_(False)
        for config, _ in held:
            config._attn_implementation = name
        for config, _ in experts:
            config._experts_implementation = "batched_mm"
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_()
        for config, before in experts:
            config._experts_implementation = before
        for config, before in held:
            config._attn_implementation = before


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,  # noqa: ARG001 - transformers' way to call it; nothing is dropped here
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if attention_mask is not None or getattr(module, "is_causal", True) is False:
        raise CaptureRefused("attention that is not causal, or has its own mask, cannot be served")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    found = ATTEND(
        query, key, value, int(module.layer_idx), scale, sliding_window or 0, softcap or 0.0, s_aux
    )
    return found.transpose(1, 2).contiguous(), None


def _whole_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    layers: list[nn.Module],
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    if attention_mask is not None or getattr(module, "is_causal", False) or module not in layers:
        raise CaptureRefused("attention that is causal, or has its own mask, makes no encoder")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    found = ATTEND(query, key, value, layers.index(module), scale, WHOLE)
    return found.transpose(1, 2).contiguous(), None
