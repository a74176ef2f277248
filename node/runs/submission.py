"""From what a person asks for (RUN.toml, a captured model, data) to the manifest of a run.

Everything that does not fit together is said here, in the person's words, before anybody else is asked.
"""

import re
from collections.abc import Sequence

from crypto.errors import RemoteProtocolError
from node.errors import UsageError
from node.runs.admission import check_model, train_entry
from node.runs.data import Array, Batches, Dataset
from node.runs.manifest import Manifest, RunFile
from partition.model.graph import Graph, Port, Size, TensorType
from partition.model.sizes import bind

WINDOW = 64
"""Bytes of text in a sample, where neither the person nor the model says how many."""
_NAME_LENGTH_MAX = 40


def window_of(run_file: RunFile, graph: Graph, name: str) -> int:
    """How long a sample of text is: as the person says, else as the model takes it. Raises UsageError."""
    if run_file.train.window:
        return run_file.train.window
    shape = _input_type(graph, name).shape
    if len(shape) != 2:
        return WINDOW  # no text then, or what does not fit is said when it is bound
    side = shape[1]
    if not isinstance(side, Size):
        return side
    symbols = [symbol for row, symbol in enumerate(graph.symbols) if row == side.row]
    return min([WINDOW, *(symbol.maximum for symbol in symbols)])


def make_manifest(
    run_file: RunFile, graph: Graph, graph_name: bytes, dataset: Dataset, *, name: str, created: float
) -> Manifest:
    """The manifest of a run. `name` is RUN.toml's in errors, `created` unix seconds. Raises UsageError."""
    train = run_file.train
    sizes = bind_data(graph, dataset, train.microbatch, name)
    entry = train_entry(graph)
    manifest = Manifest(
        model=word(graph.name),
        graph=graph_name.hex(),
        data=dataset.digest,
        test_samples=len(dataset.test_labels),
        steps=train.steps,
        microbatch=train.microbatch,
        microbatches=train.batch // train.microbatch,
        sizes=tuple(sizes[1:]),
        metrics=tuple(metric.name for metric in entry.metrics),
        optimizer=run_file.optimizer,
        autocast=train.autocast,
        recompute=train.recompute,
        seed=train.seed,
        frames=train.frames,
        stages=run_file.plan.stages,
        replicas=run_file.plan.replicas,
        created_milliseconds=int(created * 1000),
        trainers=run_file.plan.trainers,
        window=dataset.window,
        pipeline=run_file.plan.pipeline,
        save_every=run_file.plan.checkpoint_every,
        on_lost_quorum=run_file.plan.on_lost_quorum,
        on_divergence=run_file.train.on_divergence,
    )
    try:
        check_model(manifest, graph)
    except RemoteProtocolError as error:
        raise UsageError(f"{name}: model: {error}") from None
    return manifest


def bind_data(graph: Graph, dataset: Dataset, microbatch: int, name: str) -> tuple[int, ...]:
    """The graph's symbols for micro-batches of this data. Raises UsageError where they do not fit."""
    kinds = [_input_type(graph, name), _label_type(graph, name)]
    arrays = [dataset.train_inputs, dataset.train_labels]
    shapes = [(microbatch, *array.shape[1:]) for array in arrays]
    for what, kind, array in zip(("x", "y"), kinds, arrays, strict=True):
        if array.dtype.kind == "f" and not kind.dtype.startswith("float"):
            raise UsageError(f"{name}: the model takes {what} of {kind.dtype}, the data's are {array.dtype}")
        if kind.dtype == "bfloat16":
            raise UsageError(f"{name}: the model takes {what} of bfloat16, which no data is made of")
        if len(kind.shape) != array.ndim:
            raise UsageError(f"{name}: {_unlike(what, kind, graph, array)}")
    try:
        return bind(graph.symbols, graph.expressions, kinds, shapes)
    except RemoteProtocolError as error:
        for what, kind, array in zip(("x", "y"), kinds, arrays, strict=True):
            pairs = zip(kind.shape[1:], array.shape[1:], strict=True)
            if any(not isinstance(side, Size) and side != given for side, given in pairs):
                raise UsageError(f"{name}: {_unlike(what, kind, graph, array)}") from None
        raise UsageError(f"{name}: this data does not fit the model: {error}") from None


def _unlike(what: str, kind: TensorType, graph: Graph, array: Array) -> str:
    sides = [_side(side, graph) for side in kind.shape[1:]]
    given = [str(side) for side in array.shape[1:]]
    return f"the model takes samples {what} of {_shape(sides)}, the data's are {_shape(given)}"


def _side(side: int | Size, graph: Graph) -> str:
    if not isinstance(side, Size):
        return str(side)
    return graph.symbols[side.row].name if side.row < len(graph.symbols) else "any"


def _shape(sides: Sequence[str]) -> str:
    return "x".join(sides) or "one number"


def _input_type(graph: Graph, name: str) -> TensorType:
    return _only_type(graph, name, "input")


def _label_type(graph: Graph, name: str) -> TensorType:
    return _only_type(graph, name, "label")


def _only_type(graph: Graph, name: str, what: str) -> TensorType:
    try:
        entry = train_entry(graph)
    except RemoteProtocolError as error:
        raise UsageError(f"{name}: model: {error}", "capture it with a loss") from None
    ports: tuple[Port, ...] = entry.inputs if what == "input" else entry.labels
    if len(ports) != 1:
        raise UsageError(f"{name}: the model takes {len(ports)} {what}s; data has one x and one y")
    return graph.types[ports[0].type]


def fits(dataset: Dataset, manifest: Manifest, graph: Graph) -> bool:
    """Whether this data is what a manifest was made for."""
    try:
        sizes = bind_data(graph, dataset, manifest.microbatch, manifest.model)
    except UsageError:
        return False
    return (dataset.digest, sizes) == (manifest.data, manifest.sizes_max) and len(
        dataset.test_labels
    ) >= manifest.test_samples


def make_batches(dataset: Dataset, manifest: Manifest, graph: Graph) -> Batches:
    """Micro-batches of data that `fits`, in the types that the model takes."""
    return Batches(
        dataset,
        microbatch=manifest.microbatch,
        seed=manifest.seed,
        input_type=_only_type(graph, manifest.model, "input").dtype,
        label_type=_only_type(graph, manifest.model, "label").dtype,
    )


def word(name: str) -> str:
    """A model's name as manifests and screens have it."""
    clean = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:_NAME_LENGTH_MAX]
    return clean or "model"
