"""Language models of transformers are served in stages and compared with transformers and its own
attention."""

from typing import Any

import pytest
import torch
import transformers

from partition.capture.serving import capture_for_serving
from partition.capture.serving_proof import TOLERANCES, prove_folder_served
from partition.model.graph import TYPED_GRAPH_VERSION
from partition.stage import Unit
from tests.partition.serving_world import Chain, session

SHARED = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SHARED |= {"num_key_value_heads": 2, "vocab_size": 99, "max_position_embeddings": 256}
SHARED |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "Mistral": {"sliding_window": 20},
    "Qwen3": {"head_dim": 8},
    "Gemma3": {"head_dim": 8, "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
    "Phi3": {},
    "Mixtral": {"num_local_experts": 4},
    "Qwen3Moe": {
        "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "decoder_sparse_step": 1,
    },
    "Olmo2": {},
    "Granite": {},
    "SmolLM3": {},
    "Gemma2": {"head_dim": 8, "sliding_window": 20, "query_pre_attn_scalar": 8},
    "GptOss": {"head_dim": 8, "sliding_window": 20, "num_local_experts": 4},
}  # fmt: skip
USUAL = ("Llama", "GPT2", "Mixtral")
"""Families that are always tested. The other families are slow duplicates."""
EAGER = ("Gemma2", "GptOss")
"""Families with caps or sinks that torch's own attention does not support. Their attention in plain torch
computes the softmax in float32, so only float32 is compared.
"""
CLASSES = {"GPT2": ("GPT2Config", "GPT2LMHeadModel"), "Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM")}
EXPERTS = ("Mixtral", "Qwen3Moe", "GptOss")
BOUNDS = {torch.float64: 1e-9, torch.float32: 1e-4}
CLOSE = 1e-3
"""If two logits are this close in float32, either may be chosen."""
LENGTHS = (1, 3, 8, 17, 33, 40, 64, 90)
PRECISE = [
    (family, dtype)
    for family in FAMILIES
    for dtype in BOUNDS
    if dtype == torch.float32 or family not in EAGER
]


def models(family: str, dtype: torch.dtype, **changes: Any) -> tuple[Any, Any]:
    """Return the model to capture, and one with a separate configuration object and torch's attention."""
    config, kind = CLASSES.get(family, (f"{family}Config", f"{family}ForCausalLM"))
    settings = SHARED | FAMILIES[family] | changes
    made = []
    for _ in range(2):
        made.append(getattr(transformers, kind)(getattr(transformers, config)(**settings)).to(dtype).eval())
    made[1].load_state_dict(made[0].state_dict())
    made[1].set_attn_implementation("eager" if family in EAGER else "sdpa")
    if family in EXPERTS:
        made[1].set_experts_implementation("eager")  # its usual attention has no float64
    return made[0], made[1]


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, marks=() if each in USUAL else pytest.mark.slow)
        for each in FAMILIES
        if each not in EAGER
    ],
)
def test_split_serving_gives_the_logits_of_transformers(family: str) -> None:
    torch.manual_seed(3)
    served, plain = models(family, torch.float64)
    captured = capture_for_serving(served)
    assert captured.graph.version == 1
    proof = prove_folder_served(plain, captured.graph)
    assert (proof.has_model, proof.tolerance) == (True, 1e-9)
    chain = Chain(captured.graph, served.state_dict(), stages=2)
    ids = torch.randint(3, 99, (3, 90))
    with torch.no_grad():
        wanted = plain(input_ids=ids, use_cache=False).logits
    # Prompts of several lengths together, then in parts, then as single tokens.
    lengths = (40, 3, 70)
    units = [Unit(session(row), 0, length, length) for row, length in enumerate(lengths)]
    found = chain.logits(units, [token for row, n in enumerate(lengths) for token in ids[row, :n].tolist()])
    begin = 0
    for row, length in enumerate(lengths):
        torch.testing.assert_close(found[begin : begin + length], wanted[row, :length], rtol=0, atol=1e-9)
        begin += length
    for step in range(5):
        units = [Unit(session(row), length + step, 1, 1) for row, length in enumerate(lengths)]
        tokens = [int(ids[row, length + step]) for row, length in enumerate(lengths)]
        rows = torch.stack([wanted[row, length + step] for row, length in enumerate(lengths)])
        torch.testing.assert_close(chain.logits(units, tokens), rows, rtol=0, atol=1e-9)
    # The head's input is the last of transformers' hidden states.
    with torch.no_grad():
        states = plain(input_ids=ids[:1], use_cache=False, output_hidden_states=True).hidden_states[-1][0]
    read = [
        chain.ask([Unit(session(9), begin, 30, 30)], ids[0, begin : begin + 30].tolist(), is_hidden=True)
        for begin in (0, 30, 60)
    ]
    assert all(isinstance(each, torch.Tensor) for each in read)
    torch.testing.assert_close(torch.cat(read), states, rtol=0, atol=1e-9)  # type: ignore[arg-type]  # tensors


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dtype"), PRECISE, ids=str)
def test_greedy_tokens_are_those_of_transformers_and_batches_change_no_bit(
    family: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(3)
    served, plain = models(family, dtype, initializer_range=0.2)
    chain = Chain(capture_for_serving(served).graph, served.state_dict(), stages=2)
    ids = torch.randint(3, 99, (len(LENGTHS), 93))
    with torch.no_grad():
        wanted = plain(input_ids=ids, use_cache=False).logits
    # All together, and each alone; the results must be equal bit for bit. Then three more tokens.
    units = [Unit(session(row), 0, length, length) for row, length in enumerate(LENGTHS)]
    prompts = [ids[row, :length].tolist() for row, length in enumerate(LENGTHS)]
    together = chain.logits(units, [token for prompt in prompts for token in prompt]).split(LENGTHS)  # type: ignore[no-untyped-call]  # torch's
    for row, length in enumerate(LENGTHS):
        alone = chain.logits([Unit(session(100 + row), 0, length, length)], prompts[row])
        assert torch.equal(together[row], alone)
        torch.testing.assert_close(alone, wanted[row, :length], rtol=0, atol=BOUNDS[dtype])
    for step in range(3):
        tokens = [int(ids[row, length + step]) for row, length in enumerate(LENGTHS)]
        units = [Unit(session(row), length + step, 1, 1) for row, length in enumerate(LENGTHS)]
        together = chain.logits(units, tokens).split(1)  # type: ignore[no-untyped-call]  # torch's
        for row, length in enumerate(LENGTHS):
            alone = chain.logits([Unit(session(100 + row), length + step, 1, 1)], tokens[row : row + 1])
            assert torch.equal(together[row], alone)
            torch.testing.assert_close(alone[0], wanted[row, length + step], rtol=0, atol=BOUNDS[dtype])
    # A hundred tokens; transformers uses its own cache of keys and values.
    asked, past = ids[:1, :20], None
    said = chain.logits([Unit(session(200), 0, 20, 1)], asked[0].tolist())
    for position in range(20, 120):
        with torch.no_grad():
            answer = plain(input_ids=asked, past_key_values=past, use_cache=True)
        past, row = answer.past_key_values, answer.logits[0, -1]
        first, second = row.topk(2).values
        if dtype == torch.float32 and first - second <= CLOSE:
            break
        asked = row.argmax().reshape(1, 1)
        assert int(said[0].argmax()) == int(asked), position
        said = chain.logits([Unit(session(200), position, 1, 1)], [int(asked)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"),
    [(family, dtype) for family in FAMILIES for dtype in (torch.bfloat16, torch.float16)],
    ids=str,
)
def test_half_precision_is_served_as_precisely_as_the_model(family: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    served, plain = models(family, dtype)
    captured = capture_for_serving(served)
    assert captured.graph.version == TYPED_GRAPH_VERSION
    assert {row.type.dtype for row in captured.graph.parameters} == {str(dtype).removeprefix("torch.")}
    values = served.state_dict()
    whole = sum(each.numel() for each in served.parameters())
    assert sum(row.stored_bytes for row in captured.graph.parameters) == 2 * whole
    chain = Chain(captured.graph, values, stages=2)
    ids = torch.randint(3, 99, (1, 90))
    with torch.no_grad():
        wanted = plain(input_ids=ids, use_cache=False).logits[0].float()
        exact = plain.float()(input_ids=ids, use_cache=False).logits[0]
    found = chain.logits([Unit(session(0), 0, 90, 90)], ids[0].tolist())
    assert found.dtype == torch.float32
    scale = float(exact.abs().max())
    assert float((found - wanted).abs().max()) <= TOLERANCES[dtype] * scale
    # Neither is exact: both round, and differ from the float32 result by similar amounts.
    far, usual = (float((each - exact).abs().max()) for each in (found, wanted))
    assert far <= 2 * usual + 1e-3 * scale
    with torch.no_grad():
        states = plain(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states[-1][0]
    read = chain.ask([Unit(session(1), 0, 90, 90)], ids[0].tolist(), is_hidden=True)
    assert isinstance(read, torch.Tensor)
    assert read.dtype == torch.float32
    assert float((read - states).abs().max()) <= TOLERANCES[dtype] * float(states.abs().max())
