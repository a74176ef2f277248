"""Text answers of a model from a Hugging Face folder: continuations of prompts, or classes of texts.

The weights come from a run, the tokenizer and generation configuration from the folder. Prompts are read like
the run's data (`node.content.fine_tuning`), in the sandboxed process. For a run that was trained on chats,
they are user messages, rendered with the folder's template.
"""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from node.errors import UsageError

if TYPE_CHECKING:  # imported late, because other commands load this file too and must start fast
    from node.content.model_folder import ModelFolder
    from node.content.reading import SourceReading
    from node.protocols.run_file import RunFile

WRITTEN_MAX = 3
"""Maximum number of samples of the run's own test part that are continued if no output file is requested."""
BATCH = 8
PROMPTS = "prompts.jsonl"


@dataclass(frozen=True)
class Writing:
    """The user's settings for generation. At `temperature` 0, the likeliest token is taken."""

    prompts: tuple[str, ...] = ()
    tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


@dataclass
class Answers:
    """Prompts, the prediction for each, the truth if it is known, and the quality."""

    rows: list[tuple[str, str, str | None]] = field(default_factory=list)
    metrics: Mapping[str, float] = field(default_factory=dict)
    samples: int = 0

    def lines(self) -> list[str]:
        found = []
        for prompt, predicted, truth in self.rows:
            told = "" if truth is None else f"   (true: {_line(truth)})"
            found.append(f"{_line(prompt)} -> {_line(predicted)}{told}")
        return found


def write_answers(path: Path, found: Answers) -> None:
    """Write answers as .csv or .jsonl. Raises UsageError."""
    has_truth = any(truth is not None for _, _, truth in found.rows)
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            if path.suffix == ".csv":
                rows = csv.writer(file)
                rows.writerow(["prompt", "predicted", *(["truth"] if has_truth else [])])
                for prompt, predicted, truth in found.rows:
                    rows.writerow([prompt, predicted, *([truth or ""] if has_truth else [])])
                return
            for prompt, predicted, truth in found.rows:
                more = {} if truth is None else {"truth": truth}
                text = json.dumps({"prompt": prompt, "predicted": predicted} | more, ensure_ascii=False)
                file.write(text + "\n")
    except OSError as error:
        raise UsageError(f"--out {path}: {(error.strerror or str(error)).lower()}") from None


def predict_words(
    run_file: "RunFile",
    path: Path,
    model: "ModelFolder",
    task: Any,
    arrays: Mapping[str, Any],
    reading: "SourceReading | None",
    writing: Writing,
    *,
    is_new: bool,
    wants_all: bool,
) -> Answers:
    """Return a model's continuations of the prompts of samples. `arrays` are new samples from `read_records`,
    or the run's test part. Raises UsageError, CaptureRefused."""
    from node.cli.languages import language_of
    from node.content.tokens import Tokens
    from partition.capture.writing import Writer, judge_tokens

    language = language_of(run_file, path.parent, str(path))
    if language is None:
        raise UsageError(f"{path}: there is no tokenizer to convert the model's tokens to words")
    known = Tokens(Path(language.tokenizer), model)
    writer = Writer(
        task,
        model.path,
        tokens=writing.tokens,
        temperature=writing.temperature,
        top_k=writing.top_k,
        top_p=writing.top_p,
        seed=writing.seed,
    )
    found = Answers()
    if not is_new:
        names = (
            ["input_ids"] if model.kind == "causal" else ["input_ids", "attention_mask", "decoder_input_ids"]
        )
        found.metrics = judge_tokens(task, names, _batches(arrays, model))
    found.samples = len(next(iter(arrays.values())))
    right = judged = 0
    for number, (prompt, answer) in enumerate(_prompts_and_answers(arrays, model)):
        if number >= WRITTEN_MAX and not (is_new or wants_all):
            break
        if model.is_own_length and model.kind == "causal" and len(prompt) >= model.length_max:
            raise UsageError(
                f"a prompt has {len(prompt)} tokens; prompt and answer together may have {model.length_max}",
                "a shorter prompt",
            )
        predicted = known.decode(writer.write(prompt))
        truth = known.decode(answer) if answer else None
        if truth is not None:
            judged += 1
            right += predicted.strip() == truth.strip()
        is_chat = reading is not None and reading.records == "chat"
        found.rows.append((known.decode(prompt, special=is_chat), predicted, truth))
    if judged and reading is not None and reading.records:
        found.metrics = {**found.metrics, "exact": right / judged}
    return found


def write_prompts(folder: Path, prompts: Sequence[str], keys: Any, form: str) -> Path:
    """Write prompts as records in the form of the run's training data; return the file's path."""
    path = folder / PROMPTS
    with path.open("w", encoding="utf-8") as file:
        for prompt in prompts:
            record: dict[str, Any]
            if form == "chat":
                record = {keys.messages or "messages": [{"role": "user", "content": prompt}]}
            elif form == "labelled":
                record = {keys.text or "text": prompt}
            else:
                record = {"prompt": prompt}
            file.write(json.dumps(record) + "\n")
    return path


def _prompts_and_answers(
    arrays: Mapping[str, Any], model: "ModelFolder"
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield each sample's prompt and true answer in tokens. The answer is empty if it is not known."""
    from partition.capture.writing import new_rows, sample_rows

    if model.kind == "sequences":
        return _sequence_rows(arrays)
    return new_rows(arrays) if "ids" in arrays else sample_rows(arrays)


def _sequence_rows(arrays: Mapping[str, Any]) -> Iterator[tuple[list[int], list[int]]]:
    for ids, mask, labels in zip(
        arrays["input_ids"], arrays["attention_mask"], arrays["labels"], strict=True
    ):
        yield ids[mask > 0].tolist(), labels[labels >= 0].tolist()


def _batches(arrays: Mapping[str, Any], model: "ModelFolder") -> Iterator[tuple[list[Any], Any]]:
    inputs = ("x",) if model.kind == "causal" else ("input_ids", "attention_mask", "decoder_input_ids")
    labels = "y" if model.kind == "causal" else "labels"
    for first in range(0, len(arrays[labels]), BATCH):
        rows = slice(first, first + BATCH)
        yield [arrays[name][rows] for name in inputs], arrays[labels][rows]


def _line(text: str) -> str:
    return text.replace("\n", "\\n")
