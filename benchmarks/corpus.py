"""Models of transformers and torchvision: captured, proved, admitted and cut.

Every model that `torch.export` accepts should be captured, be proved equal to itself, and pass a peer's
admission. In two and in four stages it should train as in one process: the gradients and one step in float64.
Refusals are shown with their reasons. `--quick` examines 7 models, PEERLOOM_CORPUS=sample 25; the full run
writes docs/corpus.md. PEERLOOM_CORPUS_LOG=FILE receives each row once it is known; rows already in the file
are not examined again. torchvision's models are examined if it is installed, as `make corpus` does.
"""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[1]))

import _torchvision  # before transformers, which imports torchvision
import transformers
from _corpus_nodes import EXACT_MAX, trained_on_nodes
from _corpus_remedies import REWRITTEN
from _figures import Goal, arguments, leave, report
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from partition.capture import Captured, CaptureRefused, Task
from partition.capture.task import capture_task, captured_and_proved
from partition.execute.admit import admit
from partition.model.cut import cut
from partition.stage import StageSpecification
from tests.zoo.case import Case, Tensors
from tests.zoo.equivalence import (
    FLOAT64_MAX,
    Trial,
    errors,
    random_cut,
    run_module,
    run_stages,
    stages_possible,
)

DOCUMENT = Path(__file__).parents[1] / "docs" / "corpus.md"
MODEL_SECONDS_MAX = 240
"""Time limit for one model, in CPU seconds."""
CAPTURED_MIN, TRAINABLE_MIN = 0.95, 0.90
"""Minimum shares of the models that torch exports."""
FLOAT32_STEP_MAX = 1e-4
"""Tolerance for a float64 model that computes partly in float32, such as its softmax or its loss."""
FLOAT32_MODEL_MAX = 1e-3
"""Tolerance for a model entirely in float32."""
BATCH, LENGTH, CLASSES, VOCABULARY = 4, 8, 5, 99

FAMILIES = {
    "causal": """
        apertus arcee bart bert bert-generation big_bird biogpt bitnet blenderbot bloom camembert
        codegen cohere cohere2 cpmant ctrl data2vec-text deepseek_v2 deepseek_v3 diffllama electra ernie
        ernie4_5 exaone4 falcon_mamba flex_olmo gemma gemma2 gemma3_text glm glm4 glm4_moe gpt2
        gpt_bigcode gpt_neox gpt_oss gptj granite granitemoe helium internlm3 jamba jetmoe lfm2 llama
        longcat_flash mamba marian mbart megatron-bert minimax mistral mixtral modernbert-decoder mpt
        mvp nemotron_h olmo olmo2 olmoe openai-gpt opt pegasus persimmon phi phi3 phimoe plbart qwen2
        qwen2_moe qwen3 qwen3_moe qwen3_next recurrent_gemma rembert roberta roformer rwkv seed_oss
        smollm3 stablelm starcoder2 trocr whisper xglm xlm xmod
    """,
    "masked": """
        albert convbert deberta deberta-v2 distilbert eurobert flaubert fnet gte ibert
        jina_embeddings_v3 layoutlm longformer mobilebert modernbert mpnet mra nomic_bert nystromformer
        squeezebert tapas ultrabert yoso
    """,
    "seq2seq": """
        fsmt led longt5 m2m_100 mt5 nllb-moe pegasus_x seamless_m4t seamless_m4t_v2 switch_transformers
        t5 umt5
    """,
    "image": """
        beit convnext convnextv2 data2vec-vision deit dinov2 dinov2_with_registers ijepa imagegpt
        mobilenet_v2 pp_lcnet segformer vit vit_msn
    """,
    "audio": """
        audio-spectrogram-transformer sew sew-d wav2vec2-bert
    """,
}
"""By kind of task, transformers' names of configurations; `vision` has the families of torchvision."""
if _torchvision.is_installed():
    FAMILIES["vision"] = " ".join(_torchvision.FAMILIES)

SAMPLE = """
    bert gpt2 llama bloom gemma2 qwen3 mistral phi opt t5 mt5 albert deberta distilbert fnet mobilebert
    modernbert vit beit deit dinov2 convnextv2 whisper mamba gpt_neox
"""

QUICK = 7
"""Number of models in the quick sample, which takes less than a minute."""

SOUNDS = {"wav2vec2-bert": (24, 16), "audio-spectrogram-transformer": (32, 16)}
"""Models whose sounds are spectrograms: (time, bins). For all others a sound is a list of this many
samples."""

_SIZES: dict[Any, str] = {
    32: """hidden_size d_model n_embd dim embedding_size emb_dim embed_dim word_embed_proj_dim image_size
        moe_intermediate_size shared_expert_intermediate_size""",
    2: """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers
        num_encoder_layers num_experts_per_tok num_key_value_heads eos_token_id decoder_start_token_id""",
    4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads
        num_experts num_local_experts n_routed_experts attention_window rotary_dim""",
    64: """intermediate_size encoder_ffn_dim decoder_ffn_dim ffn_dim n_inner hidden_dim d_ff ffn_hidden_size
        max_position_embeddings n_positions n_ctx max_source_positions max_target_positions""",
    8: "d_kv head_dim patch_size qk_nope_head_dim qk_rope_head_dim v_head_dim state_size",
    16: "kv_lora_rank q_lora_rank",
    0.0: "layerdrop encoder_layerdrop decoder_layerdrop",
}
SMALL: dict[str, Any] = {name: size for size, names in _SIZES.items() for name in names.split()}
SMALL |= {"num_channels": 3, "num_labels": CLASSES, "vocab_size": VOCABULARY}
SMALL |= {"use_cache": False, "pad_token_id": 0, "bos_token_id": 1}
_STAGES = {"hidden_sizes": [16, 24, 32, 40], "depths": [1, 1, 2, 1], "drop_path_rate": 0.2}
_STAGES |= {"num_hidden_layers": 4, "patch_size": 4}
SPECIAL: dict[str, dict[str, Any]] = {
    "convnext": _STAGES,
    "convnextv2": _STAGES,
    "deepseek_v3": {"head_dim": 8, "num_key_value_heads": 4},
    "beit": {"drop_path_rate": 0.2},
    # The value that transformers itself sets for texts this short, with a warning.
    "big_bird": {"attention_type": "original_full"},
    "deepseek_v2": {
        "head_dim": 8,
        "num_key_value_heads": 4,
        "topk_method": "greedy",
        "num_experts_per_tok": 2,
    },
    "longcat_flash": {
        "num_key_value_heads": 4,
        "num_layers": 2,
        "moe_topk": 2,
        "zero_expert_num": 2,
        "expert_ffn_hidden_size": 32,
        "qk_head_dim": 16,
    },
    "mobilebert": {"embedding_size": 16, "intra_bottleneck_size": 32},
    "sew": {"apply_spec_augment": False},
    "sew-d": {"apply_spec_augment": False},
    "wav2vec2-bert": {"apply_spec_augment": False, "feature_projection_input_dim": 16},
    "audio-spectrogram-transformer": {"max_length": 32, "num_mel_bins": 16},
    "xmod": {"default_language": "en_XX"},
}
REMEDIES: dict[str, dict[str, Any]] = {"batched_mm": {"experts_implementation": "batched_mm"}}
"""By a word in a refusal, the setting that it recommends, which is tried if the refusal has the word."""
MASKED = ("longt5", "switch_transformers")
"""Models that can be exported only with a mask."""
FLOAT32 = ("fsmt", "mra", "raft", "xglm")
"""Models that compute in float32 whatever their type, so that they fail in float64 even without a capture."""
_MAPPINGS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "image": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "audio": modeling_auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
}


def tokens_loss(output: Any, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the cross entropy over the ids that count, and their number."""
    logits = output.logits if hasattr(output, "logits") else output[0]
    loss = functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")
    return loss, (labels != -100).sum()


def class_loss(output: Any, labels: Tensor) -> Tensor:
    """Return the cross entropy over classes."""
    logits = output.logits if hasattr(output, "logits") else output.last_hidden_state.flatten(1)[:, :CLASSES]
    return functional.cross_entropy(logits, labels, reduction="sum")


class Named(nn.Module):
    """Wraps a model so that its inputs are positional, as a case of the zoo requires."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *tensors: Tensor) -> Any:
        return self.model(**dict(zip(self.names, tensors, strict=True)))


def case_of(kind: str, name: str, settings: Mapping[str, Any] = MappingProxyType({})) -> Case:
    """Return a small model of an architecture, with random data to train it on; `settings` are added to its
    configuration."""
    if kind == "vision":
        draw = partial(_torchvision.draw, name)
        return Case(name, partial(_torchvision.build, name), draw, _torchvision.loss, batch=BATCH)
    found = _MAPPINGS[kind][name]
    model_class = getattr(transformers, found[0] if isinstance(found, list | tuple) else found)
    configuration = CONFIG_MAPPING[name]
    usual = configuration()
    plain = (int, float, bool, type(None))
    fields = {
        key: value
        for key, value in SMALL.items()
        if hasattr(usual, key) and getattr(usual, key) is not None and type(getattr(usual, key)) in plain
    }
    # Dropout is tested by the zoo (tests/zoo), so it is off here.
    fields |= {
        key: 0.0 for key, value in usual.to_dict().items() if "drop" in key and isinstance(value, float)
    }
    config = configuration(**{**fields, **SPECIAL.get(name, {}), **settings})
    vocabulary = min(getattr(config, "vocab_size", VOCABULARY) or VOCABULARY, VOCABULARY)
    side = getattr(config, "image_size", 32)
    picture = (getattr(config, "num_channels", 3), *((side, side) if isinstance(side, int) else (32, 32)))
    names = {
        "causal": ("input_ids",),
        "masked": ("input_ids", "attention_mask"),
        "seq2seq": ("input_ids", "decoder_input_ids"),
        "image": ("pixel_values",),
        "audio": ("input_values",),
    }[kind]
    names += ("attention_mask",) if name in MASKED else ()
    names = (
        ("input_features",) if name == "wav2vec2-bert" else ("input_ids",) if name == "imagegpt" else names
    )

    def sample(generator: torch.Generator, batch: int) -> tuple[Tensors, Tensors]:
        def ids() -> Tensor:
            return torch.randint(3, vocabulary, (batch, LENGTH), generator=generator)

        if kind in ("image", "audio"):
            shape = picture if kind == "image" else SOUNDS.get(name, (8_000,))
            if name == "imagegpt":
                given = torch.randint(3, vocabulary, (batch, LENGTH), generator=generator)
                return (given,), (torch.randint(CLASSES, (batch,), generator=generator),)
            given = torch.randn(batch, *shape, generator=generator, dtype=torch.float64)
            return (given,), (torch.randint(CLASSES, (batch,), generator=generator),)
        ones = torch.ones(batch, LENGTH, dtype=torch.int64)
        inputs = [ids(), ones if kind == "masked" else ids(), ones]
        labels = ids()
        labels[:, ::3] = -100
        return tuple(inputs[: len(names)]), (labels,)

    loss: Any = class_loss if kind in ("image", "audio") else tokens_loss
    return Case(name, lambda: Named(model_class(config), names), sample, loss, batch=BATCH)


def exportable(case: Case, dtype: torch.dtype) -> bool:
    """Return whether torch itself exports the model."""
    inputs, _ = case.data(0, BATCH, dtype)
    try:
        with redirect_stderr(io.StringIO()):
            torch.export.export(case.model(dtype), inputs, strict=False)
    except Exception:  # torch may raise any error
        return False
    return True


def examine(kind: str, name: str) -> dict[str, Any]:
    """Return the row of one model. `silent`: it was proved, but its stages do not compute what the module
    does."""
    row: dict[str, Any] = {"model": name, "kind": kind, "captured": False, "trained": False, "silent": False}
    row["why"] = ""
    dtype = torch.float32 if name in FLOAT32 else torch.float64
    try:
        case = case_of(kind, name)
        case.model(dtype)
    except Exception as error:  # the configuration is too small for this architecture
        return row | {"exported": False, "why": f"not built: {type(error).__name__}: {str(error)[:120]}"}
    found = _proved(case, dtype, row)
    # A captured model has already been exported.
    row["exported"] = found is not None or exportable(case, dtype)
    remedies = [word for word in REMEDIES if word in row["why"]]
    if found is None and remedies:
        row |= {"refusal": row["why"], "remedy": remedies[0]}
        case = case_of(kind, name, REMEDIES[remedies[0]])
        found = _proved(case, dtype, row)
    if found is None:
        if kind != "vision" and name in REWRITTEN:
            row["rewritten"] = rewritten(kind, name, dtype, row.get("remedy", ""))
        return row
    captured, limit = found
    row |= {"captured": True, "layers": len(captured.graph.layers)}
    row["entries"] = " ".join(entry.name for entry in captured.graph.entries)
    batches = (BATCH, BATCH) if captured.graph.symbols[0].minimum == BATCH else (3, 2)
    trial = Trial(steps=1, batches=batches, dtype=dtype)
    try:
        expected = run_module(case, captured.graph, trial)
        worst = 0.0
        for stages in (2, 4):
            count = min(stages, stages_possible(captured.graph))
            parts = random_cut(captured.graph, captured.hash, count, stages)
            worst = max(
                worst, errors(run_stages(case, captured.graph, parts, trial), expected, trial.dtype).worst
            )
    except (AssertionError, ValueError, RuntimeError, KeyError, IndexError, StopIteration) as error:
        return row | {"why": f"cut: {type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    row |= {
        "error": float(f"{worst:.1e}"),
        "trained": worst <= limit,
        "silent": not worst <= limit,
        "why": "",
    }
    return row


def rewritten(kind: str, name: str, dtype: torch.dtype, remedy: str) -> str:
    """Rewrite the model as its refusal recommends; return "proved", or the reason why it still fails."""
    REWRITTEN[name]()
    found: dict[str, Any] = {"why": ""}
    _proved(case_of(kind, name, REMEDIES.get(remedy, {})), dtype, found)
    return found["why"] or "proved"


def _proved(case: Case, dtype: torch.dtype, row: dict[str, Any]) -> tuple[Captured, float] | None:
    """Capture, prove and admit a model; return it with the tolerance of its stages, or None with the reason
    in the row."""
    inputs, labels = case.data(0, BATCH, dtype)
    task = Task(case.model(dtype), inputs, labels, loss=case.loss, name=case.name)
    begun = time.perf_counter()
    try:
        captured, proof = captured_and_proved(task)
        row["proved_seconds"] = round(time.perf_counter() - begun, 2)
        sizes = tuple(symbol.maximum for symbol in captured.graph.symbols[1:])
        admit(StageSpecification(b"corpus", cut(captured.graph, captured.hash, ())[0], (BATCH, *sizes)))
    except (CaptureRefused, ValueError) as error:
        row["why"] = " ".join(str(error).split())[:600]
        return None
    except Exception as error:  # a crash is a bug of ours
        row["why"] = f"CRASH {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return None
    if dtype == torch.float32:
        return captured, FLOAT32_MODEL_MAX
    return captured, FLOAT64_MAX if proof.tolerance < 1e-6 else FLOAT32_STEP_MAX


def on_nodes(kind: str, name: str, row: dict[str, Any]) -> dict[str, Any]:
    """Train a proved model for three steps on two nodes; return the figures for its row."""
    dtype = torch.float32 if name in FLOAT32 else torch.float64
    case = case_of(kind, name, REMEDIES.get(row.get("remedy", ""), {}))
    inputs, labels = case.data(0, BATCH, dtype)
    task = Task(case.model(dtype), inputs, labels, loss=case.loss, name=case.name)
    try:
        captured = capture_task(task, unproved=True, evaluation="evaluate" in row["entries"] or None)
        difference = trained_on_nodes(case, captured, dtype, BATCH)
    except Exception as error:  # any failure of a run goes into the row
        return {"nodes": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    return {"nodes": difference}


class Late(BaseException):
    """A model took too long."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise Late after this many CPU seconds."""

    def ring(*_: object) -> None:
        raise Late

    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


_ABOUT_TORCHVISION = [
    "`vision` are families of torchvision, built from its own classes with few layers. Its C++ operators do",
    "not load with a CPU build of torch, so detectors, which need them, and quantized models are left out.",
    "",
]


def _tree() -> str:
    asked = ["git", "-C", str(DOCUMENT.parent), "rev-parse", "--short", "HEAD:partition"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def document(rows: Sequence[dict[str, Any]], goals: Sequence[Goal]) -> str:
    """Return docs/corpus.md."""
    lines = [
        "# Models of other libraries",
        "",
        f"Made by `make corpus`, `partition` being git's tree {_tree()}; do not edit.",
        f"transformers {transformers.__version__} and torchvision with small configurations, float64.",
    ]
    lines += ["`error`: the largest error in losses, gradients, one step and evaluation,"]
    lines += [
        "in two and in four stages compared with one process; `with` is a setting that the refusal named."
    ]
    lines += [
        "A model that fails in float64 itself is examined in float32. `nodes`: three steps by two nodes",
        "in virtual time, and the largest difference of their result from that of one process.",
        "",
    ]
    known = sum(len(names.split()) for names in FAMILIES.values())
    lines += _ABOUT_TORCHVISION
    lines += [f"{len(rows)} of the {known} architectures that are listed were examined.", ""]
    lines += [f"- {goal.name}: {goal.value:g} (goal {goal.operator} {goal.bound:g})" for goal in goals]
    lines += [
        "",
        "| model | kind | torch exports | captured | layers | error | nodes | with | why not |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        marks = ["yes" if row[key] else "no" for key in ("exported", "captured")]
        why = "" if row["trained"] else str(row["why"]).replace("|", "/")[:400]
        remedy = row.get("remedy", "") if row["captured"] else ""
        if "rewritten" in row:
            remedy = f"rewritten as it says: {row['rewritten'][:80]}"
        nodes = row.get("nodes", "")
        told = f"{nodes:.1e}" if isinstance(nodes, float) else nodes
        cells = [row["model"], row["kind"], *marks, row.get("layers", ""), row.get("error", ""), told]
        cells += [remedy, why]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Examine every model."""
    flags = arguments(__doc__ or "", nodes="train each for three steps on two nodes, too")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    is_sample = os.environ.get("PEERLOOM_CORPUS", "") == "sample"
    wanted = [(kind, name) for kind, names in FAMILIES.items() for name in names.split()]
    if flags.quick or is_sample:
        chosen = SAMPLE.split()[:QUICK] if flags.quick else SAMPLE.split()
        wanted = [(kind, name) for kind, name in wanted if name in chosen and kind != "vision"]
    log = os.environ.get("PEERLOOM_CORPUS_LOG", "")
    known = _logged(log)
    for kind, name in wanted:
        row = known.get((kind, name), {})
        if row and (not flags.nodes or not row["trained"] or "nodes" in row):
            continue
        try:
            # torch writes pages of output to both.
            with limited(MODEL_SECONDS_MAX), contextlib.redirect_stdout(io.StringIO()):
                row = row or examine(kind, name)
                if flags.nodes and row["trained"]:
                    row |= on_nodes(kind, name, row)
        except Late:
            if row:
                row["nodes"] = f"not done in {MODEL_SECONDS_MAX} s"
            else:
                row = {"model": name, "kind": kind, "exported": True, "captured": False, "trained": False}
                row |= {"silent": False, "why": f"not done in {MODEL_SECONDS_MAX} s"}
        known[kind, name] = row
        if log:
            with Path(log).open("a") as file:
                file.write(json.dumps(row) + "\n")
        told = "yes" if row["trained"] else row["why"][:100]
        print(name, told, row.get("nodes", ""), file=sys.stderr)
    # In the order of the list, whatever the order in a log.
    rows = [known[each] for each in wanted if each in known]
    goals = goals_of(rows)
    if not flags.quick and not is_sample:
        DOCUMENT.write_text(document(rows, goals))
    return report("corpus", rows, goals, as_json=flags.json)


def _logged(log: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the logged rows by kind and name; the last one counts if there are several."""
    if not log or not Path(log).exists():
        return {}
    rows = [json.loads(line) for line in Path(log).read_text().splitlines()]
    return {(row["kind"], row["model"]): row for row in rows}


def goals_of(rows: Sequence[dict[str, Any]]) -> list[Goal]:
    """Return the goals: minimum shares of the models that torch exports."""
    exported = [row for row in rows if row["exported"]]
    count = max(1, len(exported))
    asked = [row for row in rows if "nodes" in row]
    on_two = [
        Goal(
            "of those tried, trained 3 steps by two nodes",
            sum(map(is_equal_on_nodes, asked)) / len(asked),
            ">=",
            1.0,
        )
    ]
    return [
        *(on_two if asked else []),
        Goal(
            "captured, proved, admitted", sum(row["captured"] for row in exported) / count, ">=", CAPTURED_MIN
        ),
        Goal("trainable", sum(row["trained"] for row in exported) / count, ">=", TRAINABLE_MIN),
        Goal("silently wrong", sum(row["silent"] for row in rows), "<=", 0),
    ]


def is_equal_on_nodes(row: dict[str, Any]) -> bool:
    """Return whether training on nodes gave the same result as in one process."""
    found = row["nodes"]
    # The stages of a float64 model that computes partly in float32 exceed this tolerance, too.
    is_exact = row["model"] not in FLOAT32 and row["error"] <= EXACT_MAX
    return isinstance(found, float) and found <= (EXACT_MAX if is_exact else FLOAT32_STEP_MAX)


if __name__ == "__main__":
    leave(main())
