"""`peerloom predict RUN.toml --run RUN`: predictions of a trained model, compared with the truth.

All of it happens in this command's process. It builds the model that RUN.toml names (the user's own code, on
the user's own machine), loads the run's weights, and computes. No data leaves the machine.
"""

import csv
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from node.cli.options import GRAPH_SUFFIX, AsJson, DataDir, find_data_dir
from node.cli.outputs import output_path
from node.cli.predict_words import Answers, Writing, predict_words, write_answers, write_prompts
from node.cli.render import progress, show, show_json
from node.errors import UsageError
from node.text import counted

if TYPE_CHECKING:  # the command line loads this file for every command
    from node.content.model_folder import ModelFolder
    from node.protocols.run_file import RunFile

BATCH = 64
COLUMNS_MAX = 64
"""Maximum number of outputs of a sample in a CSV file, one per column. More must go into an .npz."""


def predict(
    context: typer.Context,
    run_file: Annotated[str, typer.Argument(metavar="RUN.toml", help="What was trained.")],
    run: Annotated[str, typer.Option("--run", metavar="RUN", help="The run whose weights to use.")] = "",
    weights: Annotated[str, typer.Option("--weights", metavar="FILE", help="Or a file of weights.")] = "",
    data: Annotated[
        str, typer.Option("--data", metavar="SOURCE", help="New samples; default: the run's test samples.")
    ] = "",
    out: Annotated[
        str, typer.Option("--out", metavar="FILE", help="FILE.npz or FILE.csv of predictions.")
    ] = "",
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", metavar="TEXT", help="A prompt for a text model to answer."),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", min=0, help="Maximum number of tokens to write.")] = 0,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0, max=10, help="0: always the likeliest token.")
    ] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="Draw from this many tokens; 0: all.")] = 0,
    top_p: Annotated[
        float, typer.Option("--top-p", min=0.01, max=1, help="Draw from the likeliest with this total share.")
    ] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of what is drawn.")] = 0,
    picture: Annotated[
        str,
        typer.Option(
            "--picture", metavar="FILE.svg", help="Draw the confusion matrix and samples into this file."
        ),
    ] = "",
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """Predict with a trained model, and compare with the ground truth if there is one."""
    if bool(run) == bool(weights):
        raise UsageError("give --run RUN or --weights FILE", "runs: `peerloom runs`")
    writing = Writing(tuple(prompt or ()), tokens, temperature, top_k, top_p, seed)
    written = _outputs(out, picture)
    _check_writing(writing, data)
    with tempfile.TemporaryDirectory(prefix="peerloom-") as text:
        folder = Path(text)
        kept = None
        if run:
            weights = str(folder / "weights.safetensors")
            kept = _fetch_weights(find_data_dir(context, data_dir), run, weights)
        found = run_model(
            Path(run_file).expanduser(),
            Path(weights).expanduser(),
            data,
            folder,
            kept,
            writing,
            wants_all="out" in written,
        )
    if isinstance(found, Answers):
        _finish_answers(found, written, as_json=as_json)
    else:
        _finish_predictions(found, written, writing.prompts, as_json=as_json)


def _fetch_weights(home: Path, run: str, out: str) -> Mapping[str, Any] | None:
    """Let this machine's node write a run's weights into a file. Return how the run's data was read, if that
    is known."""
    from node.cli.client import ask

    ask(home, "runs.fetch", {"run": run, "out": out}, seconds=None)
    reading: Mapping[str, Any] | None = ask(home, "runs.show", {"run": run}).get("reading")
    return reading


def _finish_predictions(
    found: "Predictions", written: Mapping[str, Path], prompts: Sequence[str], *, as_json: bool
) -> None:
    """Show what a model predicted, and write it into files. Raises UsageError."""
    if "out" in written and written["out"].suffix == ".jsonl":
        raise UsageError(
            f"--out {written['out']}: this model does not write text", "use --out FILE.csv or FILE.npz"
        )
    if "out" in written:
        write_predictions(written["out"], found)
    if "picture" in written:
        from node.cli.predict_svg import picture

        drawn = picture(
            confusion=found.confusion,
            inputs=found.inputs,
            predicted=found.predicted,
            truth=found.truth,
            words=found.words,
        )
        written["picture"].write_text(drawn)
    document = {
        "schema": "peerloom/predict/1",
        "samples": len(found.outputs),
        "metrics": found.metrics,
        "confusion": None if found.confusion is None else found.confusion.tolist(),
        **{name: str(path) for name, path in written.items()},
    }
    if as_json:
        show_json(document)
        return
    told = "; no labels, so nothing to compare with" if found.truth is None else ""
    show([f"{counted(len(found.outputs), 'sample')}{told}"])
    for text, value in zip(prompts, found.predicted.reshape(-1), strict=False):
        show([f"  {text} -> {_shown(value, found)}"])
    show([f"  {name} {value:.6g}" for name, value in found.metrics.items() if name != "samples"])
    show([f"written to {path}" for path in written.values()], sys.stderr)


def _outputs(out: str, picture: str) -> dict[str, Path]:
    """Return the output files. Raises UsageError."""
    written = {
        name: output_path(text, f"--{name}") for name, text in (("out", out), ("picture", picture)) if text
    }
    if "out" in written and written["out"].suffix not in (".npz", ".csv", ".jsonl"):
        raise UsageError(f"--out {out}: want FILE.npz or FILE.csv; for a text model, FILE.jsonl or .csv")
    if "picture" in written and written["picture"].suffix != ".svg":
        raise UsageError(f"--picture {picture}: want FILE.svg")
    return written


def _check_writing(writing: Writing, data: str) -> None:
    if (writing.top_k or writing.top_p < 1 or writing.seed) and not writing.temperature:
        raise UsageError("--top-k, --top-p and --seed: nothing is drawn", "--temperature 0.7, for example")
    if writing.prompts and data:
        raise UsageError("--prompt and --data: give only one of them")


def _finish_answers(found: Answers, written: Mapping[str, Path], *, as_json: bool) -> None:
    """Show a model's texts, and write them into a file. Raises UsageError."""
    if "picture" in written:
        raise UsageError("--picture: a text model has no confusion matrix", "--out FILE.jsonl")
    if "out" in written:
        if written["out"].suffix == ".npz":
            raise UsageError(
                f"--out {written['out']}: words are not arrays", "use --out FILE.jsonl or FILE.csv"
            )
        write_answers(written["out"], found)
    if as_json:
        rows = [{"prompt": prompt, "predicted": said, "truth": true} for prompt, said, true in found.rows]
        more = {name: str(path) for name, path in written.items()}
        document = {"schema": "peerloom/predict/1", "samples": found.samples, "metrics": {**found.metrics}}
        show_json(document | {"answers": rows} | more)
        return
    show([counted(found.samples, "sample"), *(f"  {line}" for line in found.lines())])
    show([f"  {name} {value:.6g}" for name, value in found.metrics.items()])
    show([f"written to {path}" for path in written.values()], sys.stderr)


@dataclass(frozen=True)
class Predictions:
    """Outputs (N, ...), the predictions made from them, and their quality. `words` are the names of the
    classes, if known."""

    outputs: Any
    predicted: Any
    inputs: Sequence[Any]
    truth: Any
    metrics: dict[str, float]
    confusion: Any
    words: list[str]


def run_model(
    path: Path,
    weights: Path,
    data: str,
    folder: Path,
    kept: Mapping[str, Any] | None = None,
    writing: Writing = Writing(),  # noqa: B008 - frozen
    *,
    wants_all: bool = False,
) -> "Predictions | Answers":
    """Predict for the samples of `data`, or if it is empty, for those of the run in the RUN.toml at `path`;
    or answer prompts with a language model. `kept` is the reading of the run's data, if this machine's node
    has it. Raises UsageError."""
    import numpy as np
    import safetensors
    import safetensors.numpy

    from node.content.metrics import judge, predicted_of
    from node.content.samples import ITEM
    from partition.capture.errors import CaptureRefused
    from partition.capture.models.prediction import input_names, load_weights, make_task, outputs_of

    run_file, model = _model_of(path, writing)
    arrays, shape, classes, reading = _samples(run_file, path, data, folder, kept, writing.prompts)
    words = (
        list(reading.words) if reading is not None and reading.words else list(model.words) if model else []
    )
    try:
        stored = safetensors.numpy.load_file(weights)
        task = make_task(run_file.model, shape, classes, dtype=run_file.train.dtype, options=run_file.options)
        names = input_names(task)
        load_weights(task, stored)
        if model is not None and _writes(model):
            return predict_words(
                run_file,
                path,
                model,
                task,
                arrays,
                reading,
                writing,
                is_new="ids" in arrays or bool(data or writing.prompts),
                wants_all=wants_all,
            )
        columns = [_column(arrays, name, place, names, ITEM) for place, name in enumerate(names)]
        outputs = np.concatenate(list(outputs_of(task, _batches(columns))))
    except (safetensors.SafetensorError, OSError, TypeError) as error:
        raise UsageError(f"{weights}: no weights that can be read: {str(error)[:200]}") from None
    except CaptureRefused as error:
        raise UsageError(f"{path}: {error}") from None
    rest = [name for name in arrays if not any(arrays[name] is column for column in columns)]
    truth = np.asarray(arrays["y" if "y" in rest else rest[0]][:]) if rest else None
    if truth is None:
        return Predictions(outputs, predicted_of(outputs, None), columns, None, {}, None, words)
    judged = judge(outputs, truth)
    return Predictions(outputs, judged.predicted, columns, truth, judged.metrics, judged.confusion, words)


def _model_of(path: Path, writing: Writing) -> "tuple[RunFile, ModelFolder | None]":
    """Return the RUN.toml at `path`, with its model relative to the present folder, and the model's Hugging
    Face folder, if it is one. Raises UsageError if the model cannot predict, or cannot answer in words
    although that is requested."""
    from msgspec.structs import replace

    from node.api.task_defaults import read_run
    from node.cli.languages import model_folder_of
    from node.toml import read_text

    run_file, _ = read_run(read_text(path), path.parent, str(path))
    if run_file.model.endswith(GRAPH_SUFFIX):
        raise UsageError(
            f"{path}: model: {run_file.model} is a graph, which ends in its loss",
            "name the function that makes the model: PATH.py:FUNCTION",
        )
    if ".py:" in run_file.model:
        own = str(path.parent / Path(run_file.model).expanduser())
        run_file = replace(run_file, model=own)
    model = model_folder_of(run_file, path.parent)
    if model is not None:
        run_file = replace(run_file, model=str(model.path))
    if (writing.prompts and not (model and model.is_of_text)) or (
        writing != Writing(writing.prompts) and not (model and _writes(model))
    ):
        raise UsageError(
            f"{path}: model: {run_file.model} does not take text",
            "leave out --prompt, --tokens and --temperature: they are for the model of a Hugging Face folder",
        )
    return run_file, model


def _writes(model: "ModelFolder") -> bool:
    """Return whether a model of a Hugging Face folder answers in text."""
    return model.kind in ("causal", "sequences")


def _column(arrays: Mapping[str, Any], name: str, place: int, names: list[str], item: str) -> Any:
    for known in (name, f"{item}{place}", "x" if len(names) == 1 else ""):
        if known in arrays:
            return arrays[known]
    raise UsageError(f"the model takes {', '.join(names)}; the data has {', '.join(arrays)}")


def _batches(columns: Sequence[Any]) -> Iterator[list[Any]]:
    for first in range(0, len(columns[0]), BATCH):
        yield [column[first : first + BATCH] for column in columns]


def _samples(
    run_file: Any,
    path: Path,
    data: str,
    folder: Path,
    kept: Mapping[str, Any] | None,
    prompts: Sequence[str],
) -> tuple[Mapping[str, Any], tuple[int, ...], int, Any]:
    """Return arrays to predict from, and shape, classes and reading of the training data. Raises
    UsageError."""
    import msgspec
    from msgspec.structs import replace

    from node.cli.capture import prepare_data
    from node.content import datasets as datasets
    from node.content.reading import SourceReading
    from node.runs.manifest_builder import WINDOW
    from partition.capture.models import BUILTIN

    reading = None if kept is None else msgspec.convert(kept, SourceReading)
    is_built_in = run_file.model in BUILTIN
    shape: tuple[int, ...] = ()
    classes = 0
    found: Mapping[str, Any] = {}
    if is_built_in or not (data or prompts) or reading is None:
        trained = folder / "trained"
        trained.mkdir()
        source = run_file
        if (now := prepare_data(run_file, path.parent, trained, str(path), progress)) is not None:
            source = msgspec.structs.replace(run_file, data=str(trained))
            reading = _agreed(reading, now, str(path))
        if is_built_in or not (data or prompts):
            window = run_file.train.window or WINDOW
            dataset = datasets.load(source.source, path.parent, window=window)
            if is_built_in:
                words = [] if reading is None else reading.words
                shape, classes = dataset.sample_shape, max(dataset.classes, len(words))
            found = dataset.test
    if prompts:
        form = reading.records if reading is not None else ""
        file = str(write_prompts(folder, prompts, run_file.data_keys, form))
        keys = replace(run_file.data_keys, source=file, prompt="", completion="", ignore=None, separator="")
        if (form or "text") == "text":
            keys = replace(keys, text="", messages="")
        found = _new_samples(run_file, path, file, folder, reading, keys)
    elif data:
        keys = replace(run_file.data_keys, source=data)
        found = _new_samples(run_file, path, data, folder, reading, keys)
    return found, shape, classes, reading


def _agreed(kept: Any, now: Any, name: str) -> Any:
    """Return the reading with which a run was trained. Raises UsageError if its data has changed since."""
    if kept is None:
        return now
    for key, called in (("words", "classes"), ("features", "features")):
        if getattr(kept, key) != getattr(now, key):
            raise UsageError(
                f"{name}: data: the {called} of {now.source} are not those that the run was trained on",
                (
                    "use the data as it was when the run was started; see how it was read "
                    "then: `peerloom runs show RUN`"
                ),
            )
    return kept


def _new_samples(
    run_file: Any, path: Path, data: str, folder: Path, reading: Any, keys: Any
) -> Mapping[str, Any]:
    """Return samples of another source, read like the training data."""
    from msgspec.structs import replace

    from node.cli.languages import language_of
    from node.content import datasets as datasets
    from node.content.fenced_reading import read_fenced
    from node.content.reading import SourceReading
    from node.content.sources import SourceWish, is_source
    from node.runs.manifest_builder import WINDOW

    language = language_of(
        replace(run_file, data=str(Path(data).expanduser().absolute())), path.parent, str(path)
    )
    if language is None and not is_source(data, Path()) and not Path(data).expanduser().is_dir():
        return datasets.load(data, Path(), window=run_file.train.window or WINDOW).test
    like = reading if reading is not None else SourceReading(run_file.source)
    is_table = Path(data).suffix.lower() in (".csv", ".tsv")
    if not is_table:  # the keys of a text table do not apply to another form
        keys = replace(keys, separator="", decimal="", encoding="", header=None)
    return read_fenced(SourceWish(data, Path(), keys, like=like, language=language), folder, progress).parts[
        "train"
    ]


def write_predictions(path: Path, found: Predictions) -> None:
    """Write outputs, predictions and truth as .npz or .csv. Raises UsageError."""
    import numpy as np

    try:
        if path.suffix == ".npz":
            truth = {} if found.truth is None else {"truth": found.truth}
            np.savez(path, outputs=found.outputs, predicted=found.predicted, **truth)
            return
        flat = found.outputs.reshape(len(found.outputs), -1)
        if found.predicted.ndim > 1 and found.predicted.size != len(found.predicted):
            raise UsageError(f"--out {path}: several predictions for each sample", "--out FILE.npz")
        columns = range(flat.shape[1] if flat.shape[1] <= COLUMNS_MAX else 0)
        with path.open("w", newline="") as file:
            rows = csv.writer(file)
            truth_name = [] if found.truth is None else ["truth"]
            rows.writerow(["sample", "predicted", *truth_name, *(f"output_{n}" for n in columns)])
            for row, values in enumerate(flat):
                true = (
                    [] if found.truth is None else [_shown(found.truth.reshape(len(flat), -1)[row][0], found)]
                )
                said = _shown(found.predicted.reshape(-1)[row], found)
                rows.writerow([row, said, *true, *(float(values[n]) for n in columns)])
    except OSError as error:
        raise UsageError(f"--out {path}: {(error.strerror or str(error)).lower()}") from None


def _shown(value: Any, found: Predictions) -> object:
    if value.dtype.kind in "iu" and 0 <= int(value) < len(found.words):
        return found.words[int(value)]
    return value.item()
