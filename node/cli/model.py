"""`peerloom model`: capture a model into a file, show the contents of such a file, or verify it.

A captured model is FILE.peerloom, which holds the graph in the form that is sent to peers. If the model has
its own initial values, they are in a safetensors file in the same folder. `show` needs neither torch nor the
model's code. `capture` and `verify` load torch and run the code of the model that the user names on the
command line. They never run code from anywhere else.
"""

import contextlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from node.cli.options import GRAPH_SUFFIX, VALUES_SUFFIX, AsJson, CommandGroup
from node.cli.outputs import output_path
from node.cli.render import bytes_text, labelled, seconds_text, show, show_json
from node.errors import UsageError
from node.invocation import command_span
from node.suggest import did_you_mean
from node.text import counted

if TYPE_CHECKING:
    from partition.capture import Captured, Task
    from partition.capture.proof import Proof
    from partition.model.graph import Graph

app = typer.Typer(cls=CommandGroup, no_args_is_help=False, rich_markup_mode=None)


File = Annotated[str, typer.Argument(metavar="FILE", help="A captured model, FILE.peerloom.")]
Sample = Annotated[
    str,
    typer.Option(
        "--sample", metavar="3,32,32", help="Shape of a built-in model's sample, without the batch."
    ),
]
Classes = Annotated[
    int, typer.Option("--classes", metavar="N", help="Number of classes of a built-in model.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=NUMBER", help="An option of the model's function, such as layers=4."),
]
Batch = Annotated[int, typer.Option("--batch", metavar="N", help="Samples in a micro-batch.")]


@app.callback()
def model() -> None:
    """Capture a model into a file, show one, or verify one."""


@app.command()
def capture(
    source: Annotated[
        str,
        typer.Argument(
            metavar="PATH.py:FUNCTION|FOLDER|NAME", help="Your own, Hugging Face's, or a built-in one."
        ),
    ],
    out: Annotated[str, typer.Option("-o", "--out", metavar="FILE", help="File to write it to.")] = "",
    split: Annotated[
        list[str] | None, typer.Option("--split", metavar="MODULE", help="Cut only before these modules.")
    ] = None,
    together: Annotated[
        list[str] | None, typer.Option("--together", metavar="A,B", help="Never cut between these modules.")
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", metavar="float32|float64")] = "float32",
    sample: Sample = "",
    classes: Classes = 0,
    settings: Settings = None,
    proof: Annotated[
        bool, typer.Option("--proof/--no-proof", help="Compare it with the model before writing it.")
    ] = True,
    explain: Annotated[
        bool,
        typer.Option("--explain", help="Report the result, or every obstacle; write nothing."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Capture a model with its loss: a graph that any peer can check, cut and run."""
    if dtype not in ("float32", "float64"):
        raise UsageError(f"--dtype {dtype}: want float32 or float64")
    wanted = _Wanted(
        source, sample, classes, tuple(settings or ()), "float64" if dtype == "float64" else "float32"
    )
    if explain:
        unused = {"--out": out, "--split": split, "--together": together, "--no-proof": not proof}
        for flag in (name for name, given in unused.items() if given):
            raise UsageError(f"model capture: {flag} has no effect with --explain, which writes nothing")
        _explain(wanted, as_json=as_json)
        return
    target = _target(out, source)
    with _told():
        from partition.capture.weights import write_weights

        show([f"capturing {source}"], sys.stderr)
        with wanted.task() as task:
            chosen = replace(
                task,
                split=tuple(split or task.split),
                together=tuple(tuple(group.split(",")) for group in together or ()) or task.together,
                name=task.name or _stem(source),
            )
            captured, proven = _capture(chosen, proof=proof)
        if captured.stored:
            _check_free(target)
            write_weights(target.with_suffix(VALUES_SUFFIX), captured)
        target.write_bytes(captured.data)
    _show_captured(captured, proven, target, as_json=as_json)


def _show_captured(captured: "Captured", proven: "Proof | None", target: Path, *, as_json: bool) -> None:
    from node.cli.model_summary import portrait, portrait_lines

    if captured.unused:
        show([f"not trained, because nothing uses them: {', '.join(captured.unused)[:300]}"], sys.stderr)
    document = portrait(target, captured.graph, captured.hash)
    if as_json:
        show_json({**document, "schema": "peerloom/model-capture/1", "proof": _proof_document(proven)})
        return
    if proven is not None:
        show([_proof_text(proven)], sys.stderr)
    look = command_span("model", "show", str(target))
    show([*portrait_lines(document), "", f"written to {target}; look: {look}"])


def _target(out: str, source: str) -> Path:
    """Return the file to which a capture is written. Raises UsageError."""
    target = Path(out).expanduser() if out else Path(_stem(source) + GRAPH_SUFFIX)
    if target.suffix != GRAPH_SUFFIX:
        raise UsageError(f"--out {out}: want a name that ends in {GRAPH_SUFFIX}")
    output_path(str(target))
    return target


def _capture(task: "Task", *, proof: bool) -> "tuple[Captured, Proof | None]":
    """Capture a model, with a proof if requested and if the model has values. Raises CaptureRefused."""
    from partition.capture.models.model_spec import task_has_values
    from partition.capture.task import capture_task, captured_and_proved, check_admission

    if proof and task_has_values(task):
        return captured_and_proved(task)
    captured = capture_task(task, unproved=not task_has_values(task))
    check_admission(task, captured)
    return captured, None


def _explain(wanted: "_Wanted", *, as_json: bool) -> None:
    """Show what a capture would give. Raises UsageError if it fails, with every reason."""
    with _told():
        from partition.capture.explain import explain

        show([f"tracing {wanted.source}"], sys.stderr)
        with wanted.task() as task:
            found = explain(task, name=task.name or _stem(wanted.source))
    if as_json:
        facts = dict(found.facts)
        document = {"source": wanted.source, "seconds": found.seconds, "refusals": list(found.refusals)}
        show_json({"schema": "peerloom/model-explain/1", **document, "facts": facts})
    if found.refusals:
        count = len(found.refusals)
        lines = [f"{number + 1}. {line}" for number, line in enumerate(found.refusals)]
        if not as_json:
            show(lines, sys.stderr)
        raise UsageError(f"{wanted.source} cannot be captured, for {count} reason{'s' if count > 1 else ''}")
    if not as_json:
        show([f"{wanted.source} can be captured ({seconds_text(found.seconds)}, nothing proved yet)"])
        show([labelled(what, how) for what, how in found.facts])


@app.command("show")
def show_model(
    file: File,
    svg: Annotated[str, typer.Option("--svg", metavar="OUT", help="Draw the model into this file.")] = "",
    batch: Batch = 0,
    stages: Annotated[
        int, typer.Option("--stages", metavar="N", help="Show how this many equal machines would share it.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Show the contents of a captured model: layers, costs, boundaries, entry points."""
    from node.cli.model_summary import portrait, portrait_lines, read_graph

    if batch < 0 or stages < 0:
        raise UsageError(f"--{'batch' if batch < 0 else 'stages'}: want a number from 1")
    path = Path(file).expanduser()
    if svg:
        output_path(svg, "--svg")
    graph, name = read_graph(path)
    document = portrait(path, graph, name, batch=batch, stages=stages)
    if svg:
        from node.cli.model_svg import picture

        try:
            Path(svg).expanduser().write_text(picture(document), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--svg {svg}: {error.strerror or error}") from None
        show([f"drawn into {svg}"], sys.stderr)
    if as_json:
        show_json(document)
    else:
        show(portrait_lines(document))


@app.command()
def verify(
    file: File,
    source: Annotated[
        str, typer.Argument(metavar="[PATH.py:FUNCTION|NAME]", help="The model to compare it with.")
    ] = "",
    batch: Batch = 0,
    sample: Sample = "",
    classes: Classes = 0,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Check that a captured model is complete, may run on a peer and, given its code, is that model."""
    from node.cli.model_summary import read_graph, sizes_of

    path = Path(file).expanduser()
    graph, name = read_graph(path)
    sizes = sizes_of(graph, batch)
    document: dict[str, Any] = {
        "schema": "peerloom/model-verify/1",
        "file": file,
        "hash": name.hex(),
        "nodes": sum(len(entry.nodes) for entry in graph.entries),
        "operators": len(graph.operators),
        "layers": len(graph.layers),
    }
    with _told(f"{file}: "):
        document["values_bytes"] = _check_values(path, graph)
        document["admission"] = _admit(graph, name, sizes)
        document["proof"] = None
        if source:
            with _Wanted(source, sample, classes, tuple(settings or ()), _dtype_of(graph)).task() as task:
                proven = _proof_document(_prove(task, graph, name)) or {}
                document["proof"] = {**proven, "other_values": _other_values(task, graph)}
    if as_json:
        show_json(document)
    else:
        show(_verify_lines(document))


# The model named on the command line


@dataclass(frozen=True)
class _Wanted:
    """The model that the command line names. It is made on request."""

    source: str
    sample: str
    classes: int
    settings: tuple[str, ...]
    dtype: Literal["float32", "float64"]

    @contextmanager
    def task(self) -> "Iterator[Task]":
        """Yield the model with its loss; parameters made inside have the wanted type. Raises UsageError."""
        from partition.capture import skeleton
        from partition.capture.hugging_face import folder_task, is_folder
        from partition.capture.models import BUILTIN
        from partition.capture.models.model_spec import default_dtype
        from partition.capture.task import load_factory, task_of

        options = dict(map(_setting, self.settings))
        with default_dtype(self.dtype):
            if ".py:" in self.source:
                yield task_of(load_factory(self.source), **options)
                return
            if is_folder(self.source):
                yield task_of(partial(folder_task, Path(self.source).expanduser()), **options)
                return
            if self.source not in BUILTIN:
                known = sorted(BUILTIN)
                raise UsageError(
                    f"no model is called '{self.source[:80]}'{did_you_mean(self.source, known)}",
                    f"choose {', '.join(known)}, PATH.py:FUNCTION, or a Hugging Face folder",
                )
            if not self.sample or self.classes < 1:
                raise UsageError(
                    f"{self.source} needs --sample and --classes",
                    command_span("model", "capture", self.source, "--sample", "3,32,32", "--classes", "10"),
                )
            with skeleton():
                made = task_of(BUILTIN[self.source], _sides(self.sample), self.classes, **options)
            yield made


def _check_free(target: Path) -> None:
    """Raise UsageError if the file for the initial values exists and belongs to another model."""
    from crypto.errors import RemoteProtocolError
    from node.cli.model_summary import read_graph
    from partition.model.safetensors_layout import check_file, file_header

    values = target.with_suffix(VALUES_SUFFIX)
    try:
        with values.open("rb") as file:
            graph, _ = read_graph(target)
            check_file(graph, file.read(len(file_header(graph))), values.stat().st_size)
    except FileNotFoundError:
        return
    except (UsageError, RemoteProtocolError):
        raise UsageError(
            f"{values} already exists, and does not belong to {target}", "give another --out"
        ) from None


def _stem(source: str) -> str:
    path = Path(source.rpartition(":")[0] or source)
    return path.resolve().name if path.expanduser().is_dir() else path.stem


def _sides(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise UsageError(f"--sample {text}: want whole numbers with commas, such as 3,32,32")
    return tuple(map(int, parts))


def _setting(text: str) -> tuple[str, int | float]:
    key, equals, value = text.partition("=")
    try:
        if key.isidentifier() and equals:
            return key, int(value) if value.lstrip("-").isdecimal() else float(value)
    except ValueError:
        pass
    raise UsageError(f"--set {text}: want KEY=NUMBER, such as layers=4")


def _dtype_of(graph: "Graph") -> Literal["float32", "float64"]:
    rows = graph.parameters
    return "float64" if rows and rows[0].type.dtype == "float64" else "float32"


@contextmanager
def _told(where: str = "") -> Iterator[None]:
    """Convert errors about a file that is not a graph, or not the stated one, to UsageError."""
    from crypto.errors import RemoteProtocolError
    from partition.capture.errors import CaptureRefused

    try:
        yield
    except (CaptureRefused, RemoteProtocolError) as error:
        raise UsageError(f"{where}{error}") from error
    except OSError as error:
        name = f"{error.filename}: " if error.filename else ""
        raise UsageError(f"{name}{error.strerror or error}") from error


# Verification


def _check_values(path: Path, graph: "Graph") -> int:
    """Check every stored range against its digest. Return the total size in bytes."""
    from partition.model.safetensors_layout import stored_parameters

    rows = stored_parameters(graph)
    if not rows:
        return 0
    from partition.capture.weights import StoredFile

    with StoredFile(path.with_suffix(VALUES_SUFFIX), graph) as values:
        return sum(len(data) for _, data in values.all())


def _admit(graph: "Graph", name: bytes, sizes: tuple[int, ...]) -> dict[str, Any]:
    """Run the admission check of a peer on each layer, as a separate stage."""
    from partition.execute.admit import admit
    from partition.model.cut import cut_layers
    from partition.stage import StageSpecification

    count = len(graph.layers)
    seconds, peak, flops = 0.0, 0, 0
    try:
        stages = cut_layers(graph, name, [(layer, layer + 1) for layer in range(count)])
        for stage in stages:
            if sys.stderr.isatty():
                show([f"layer {stage.index + 1} of {count}: {graph.layers[stage.index]}"], sys.stderr)
            admitted = admit(StageSpecification(b"verify", stage, sizes))
            seconds += admitted.seconds
            peak = max(peak, admitted.peak_bytes)
            flops += admitted.flops
    except ValueError as error:
        raise UsageError(f"no peer could run it: {error}") from None
    return {"layers": count, "seconds": seconds, "peak_bytes": peak, "flops": flops}


@dataclass(frozen=True)
class _Named:
    """The facts of a graph that a proof needs."""

    graph: "Graph"
    hash: bytes


def _prove(task: "Task", graph: "Graph", name: bytes) -> "Proof":
    from partition.capture.errors import CaptureRefused
    from partition.capture.proof import prove
    from partition.capture.proof_run import Provable
    from partition.capture.task import capture_task

    show(["comparing it with the model"], sys.stderr)
    # A new capture also shows which outputs and random draws of the model the graph leaves out.
    found: Provable = _Named(graph, name)
    with contextlib.suppress(CaptureRefused):
        again = capture_task(task, unproved=True)
        found = again if again.hash == name else found
    return prove(
        task.model,
        found,
        task.example_inputs,
        task.labels,
        loss=task.loss,
        metrics=task.metrics,
        entries=task.entries,
        reduction=task.reduction,
    )


def _other_values(task: "Task", graph: "Graph") -> int:
    """Return how many stored tensors differ from the model's: some if its function draws new values."""
    from crypto.errors import RemoteProtocolError
    from partition.capture.state_dict import bytes_of
    from partition.model.graph import StoredValues
    from partition.model.safetensors_layout import check_range, stored_parameters

    tensors = {**dict(task.model.named_parameters()), **dict(task.model.named_buffers())}
    others = 0
    for row in stored_parameters(graph):
        tensor = tensors.get(row.names[0])
        assert isinstance(row.source, StoredValues)
        try:
            check_range(row.source, b"" if tensor is None or tensor.is_meta else bytes_of(tensor))
        except RemoteProtocolError:
            others += 1
    return others


def _proof_document(proof: "Proof | None") -> dict[str, Any] | None:
    if proof is None:
        return None
    return {
        "entries": list(proof.entries),
        "loss": proof.loss,
        "outputs": proof.outputs,
        "gradients": proof.gradients,
        "error": proof.error,
        "tolerance": proof.tolerance,
    }


def _proof_text(proof: "Proof") -> str:
    return (
        f"computes the same as the model: {proof.outputs} outputs and "
        f"{proof.gradients} gradients, largest difference {proof.error:.1e} of "
        f"{proof.tolerance:.0e} allowed"
    )


def _verify_lines(document: dict[str, Any]) -> list[str]:
    admission, proof = document["admission"], document["proof"]
    values = document["values_bytes"]
    lines = [
        f"{document['file']}  {document['hash'][:16]}",
        labelled(
            "form",
            f"ok  {counted(document['nodes'], 'node')}, {counted(document['operators'], 'operator')}, "
            "all allowed",
        ),
        labelled("values", f"ok  {bytes_text(values)}, every digest" if values else "ok  drawn from a seed"),
        labelled(
            "admission",
            f"ok  {counted(admission['layers'], 'layer')} in {seconds_text(admission['seconds'])}, "
            f"each at most {bytes_text(admission['peak_bytes'])} at once",
        ),
    ]
    if proof is None:
        lines.append(labelled("proof", "not requested; give the model's PATH.py:FUNCTION"))
    else:
        lines.append(
            labelled(
                "proof",
                f"ok  {proof['outputs']} outputs, {proof['gradients']} gradients, "
                f"difference {proof['error']:.1e} of {proof['tolerance']:.0e}",
            )
        )
        if proof["other_values"]:
            count = counted(proof["other_values"], "tensor")
            lines.append(labelled("", f"the file's initial values differ from this code's in {count}"))
    return lines
