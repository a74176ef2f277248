"""The cost of a capture compared with `torch.export` alone: CPU seconds, and memory in addition to the model.

The same models are exported by torch with the same dynamic sizes, and captured, in turns. A capture also
traces the loss, cleans, lowers, cuts, and checks; the proof is shown separately. For memory, a BERT of some
110 million parameters is captured and proved in a separate process, and Llama 3 8B is captured in another.
All times are CPU times, so that other load matters little. `--quick` compares only three models, once each.
"""

import resource
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers
from _figures import Goal, arguments, leave, report
from corpus import BATCH, case_of
from torch.export import Dim

from partition.capture import Task
from partition.capture.task import capture_task, prove_task

MODELS = (
    ("masked", "albert"), ("causal", "bert"), ("causal", "gpt2"), ("causal", "llama"), ("seq2seq", "t5"),
    ("image", "vit"), ("image", "beit"), ("causal", "qwen3"), ("masked", "deberta"),
)  # fmt: skip
QUICK = 3
ROUNDS = 3
LLAMA_SECONDS_MAX = 20
LLAMA_TOKENS = 64
RATIO_MAX = 1.3
BYTES_MAX = 1 << 30
"""Maximum memory in addition to the model."""
TIMEOUT_SECONDS = 1_200


def compared(kind: str, name: str, rounds: int) -> dict[str, Any]:
    """Return the CPU seconds of both, the least of some rounds in turns."""
    case = case_of(kind, name)
    inputs, labels = case.data(0, BATCH, torch.float32)
    exports, captures, proofs = [], [], []
    for _ in range(rounds):
        model = case.model(torch.float32)
        begun = time.process_time()
        dynamic = {0: Dim("batch", min=1, max=4096)}
        torch.export.export(model, inputs, dynamic_shapes=(tuple(dynamic for _ in inputs),), strict=False)
        exports.append(time.process_time() - begun)
        task = Task(case.model(torch.float32), inputs, labels, loss=case.loss)
        begun = time.process_time()
        captured = capture_task(task)
        captures.append(time.process_time() - begun)
        begun = time.process_time()
        prove_task(task, captured)
        proofs.append(time.process_time() - begun)
    row = {"model": name, "export_s": min(exports), "capture_s": min(captures), "proof_s": min(proofs)}
    return {**{key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()},
            "ratio": round(min(captures) / min(exports), 2)}  # fmt: skip


def memory(function: str, name: str) -> dict[str, Any]:
    """Return the report of a separate process: bytes of the model, the peak of other memory, and seconds."""
    code = f"import sys; sys.path[:0] = sys.argv[1:3]\nimport capture; capture.{function}()"
    here = Path(__file__).parent
    ended = subprocess.run(
        [sys.executable, "-c", code, str(here), str(here.parent)],
        stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_SECONDS, check=True,
    )  # fmt: skip
    model_bytes, peak_bytes, seconds = map(float, ended.stdout.split()[-3:])
    return {
        "model": name,
        "model_MB": model_bytes // 1e6,
        "beside_MB": peak_bytes // 1e6,
        "seconds": seconds,
    }


def measure() -> None:
    """Capture and prove a BERT whose parameters are really allocated; its memory is its peak minus that of
    the model alone."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    config = transformers.BertConfig(num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = transformers.BertForSequenceClassification(config)
    ids = torch.randint(0, 1000, (4, 32))
    size = sum(each.numel() * each.element_size() for each in model.parameters())
    before = _resident()
    begun = time.process_time()
    task = Task(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
                {"labels": torch.zeros(4, dtype=torch.int64)}, loss=_own)  # fmt: skip
    captured = capture_task(task)
    prove_task(task, captured)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(size, peak - before, round(time.process_time() - begun, 1))


def measure_llama() -> None:
    """Capture Llama 3 8B from its configuration on the meta device; all memory of the process counts."""
    from partition.capture import capture, skeleton
    from tests.zoo.hugging_face import llama_8b, logits_loss

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    begun = time.process_time()
    ids = torch.zeros(2, LLAMA_TOKENS, dtype=torch.int64)
    with skeleton():
        model = llama_8b()
    capture(model, (ids,), labels=(ids,), loss=logits_loss, name="llama-3-8b")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(0, peak, round(time.process_time() - begun, 1))


def _own(output: Any, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output.logits, labels, reduction="sum")


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> int:
    """Compare all models."""
    flags = arguments(__doc__ or "")
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    models, rounds = (MODELS[:QUICK], 1) if flags.quick else (MODELS, ROUNDS)
    compared(*MODELS[0], 1)  # the first export in a process initializes torch
    rows = [compared(kind, name, rounds) for kind, name in models]
    ratios = [row["ratio"] for row in rows]
    goals = [Goal("CPU time relative to torch.export, median", statistics.median(ratios), "<=", RATIO_MAX)]
    if not flags.quick:
        rows.append(memory("measure", "bert-base"))
        goals.append(
            Goal("memory in addition to the model, bytes", rows[-1]["beside_MB"] * 1e6, "<=", BYTES_MAX)
        )
        rows.append(memory("measure_llama", "llama-3-8b"))
        goals.append(Goal("Llama 3 8B, seconds", rows[-1]["seconds"], "<=", LLAMA_SECONDS_MAX))
        goals.append(Goal("Llama 3 8B, total bytes", rows[-1]["beside_MB"] * 1e6, "<=", BYTES_MAX))
    return report("capture", rows, goals, as_json=flags.json)


if __name__ == "__main__":
    leave(main())
