"""Text encoders as served graphs: they give one vector per text, equal to the model's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from partition.capture.errors import CaptureRefused
from partition.capture.hugging_face import folder_encoder, is_encoder
from partition.capture.serving import capture_encoder
from partition.capture.serving_proof import ServingDiffers, prove_encoder_served, prove_graph_served
from partition.execute.attention import ATTEND, WHOLE, Batch, serving
from partition.execute.pages import PAGE_TOKENS, LayerShape, Pages
from partition.model.serving import count_words, is_whole
from partition.stage import Unit

WORDS, WIDTH = 120, 32
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "initializer_range": 0.4,
    "max_position_embeddings": 130,
}


def bert() -> nn.Module:
    torch.manual_seed(1)
    config = transformers.BertConfig(**SIZES)
    model: nn.Module = transformers.BertModel(config, add_pooling_layer=False)
    return model.eval()


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_an_encoder_is_captured_together_with_its_pooling(pooling: str) -> None:
    model = bert()
    graph = capture_encoder(model, pooling).graph
    assert is_whole(graph, graph.entries[0])
    assert count_words(graph) == WORDS
    assert graph.symbols[2].maximum == 130
    # Without the model, the graph is compared with itself: a row alone, and a row among others.
    assert prove_graph_served(graph, graph).error < 1e-4
    other = "cls" if pooling == "mean" else "mean"
    with pytest.raises(ServingDiffers, match="served at once"):
        prove_encoder_served(model, graph, lambda hidden: hidden[0] if other == "cls" else hidden.mean(0))


def test_positions_of_roberta_start_after_its_padding_index() -> None:
    torch.manual_seed(1)
    model = transformers.RobertaModel(transformers.RobertaConfig(**SIZES), add_pooling_layer=False)
    assert capture_encoder(model, "mean").graph.symbols[2].maximum == 128


def test_a_causal_model_is_not_an_encoder() -> None:
    sizes = {"n_embd": WIDTH, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": WORDS}
    with pytest.raises(CaptureRefused, match="makes no encoder"):
        capture_encoder(transformers.GPT2Model(transformers.GPT2Config(**sizes)), "mean")


def test_a_folder_specifies_the_pooling_of_its_vectors(tmp_path: Path) -> None:
    config = transformers.BertConfig(**SIZES)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path)
    assert is_encoder(tmp_path)
    model, pooling = folder_encoder(tmp_path)
    assert (type(model).__name__, pooling) == ("BertModel", "mean")
    said = tmp_path / "1_Pooling" / "config.json"
    said.parent.mkdir()
    said.write_text(json.dumps({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}))
    assert folder_encoder(tmp_path)[1] == "cls"
    said.write_text(json.dumps({"pooling_mode_max_tokens": True}))
    with pytest.raises(CaptureRefused, match="only the mean of all tokens"):
        folder_encoder(tmp_path)


@pytest.mark.parametrize("tokens", [1, 5, PAGE_TOKENS, PAGE_TOKENS + 9])
def test_a_row_attends_to_its_whole_session_and_to_no_other(tokens: int) -> None:
    heads, width = 2, 8
    pages = Pages({0: LayerShape(heads, width, width)}, torch.float64, 1 << 22, torch.device("cpu"))
    lengths = (3, tokens)
    units = tuple(Unit(bytes([n]) * 16, 0, length, 1) for n, length in enumerate(lengths))
    q, k, v = torch.randn(3, 1, heads, sum(lengths), width, dtype=torch.float64).unbind()
    with serving(Batch(pages, pages.begin(units, 128))):
        found = ATTEND(q, k, v, 0, 0.5, WHOLE)
    for begin, length in zip((0, 3), lengths, strict=True):
        own = [each[:, :, begin : begin + length] for each in (q, k, v)]
        expected = nn.functional.scaled_dot_product_attention(own[0], own[1], own[2], scale=0.5)
        assert torch.allclose(found[:, :, begin : begin + length], expected, atol=1e-12)
        assert torch.allclose(ATTEND(*own, 0, 0.5, WHOLE), expected, atol=1e-12)
