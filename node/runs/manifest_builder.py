"""Builds the manifest of a run from a person's request: RUN.toml, a captured model, data.

All inconsistencies are reported here, in terms of the person's files, before any other node is asked.
"""

import re
from collections.abc import Sequence
from math import ceil

from msgspec.structs import replace

from crypto.errors import RemoteProtocolError
from node.content.datasets import Array, Batches, Dataset
from node.content.samples import ITEM
from node.errors import UsageError
from node.placement.admission import check_model, input_frame_bytes, train_entry
from node.placement.leases import FRAME_BYTES_MAX
from node.planning.choices import layers_together
from node.protocols.manifest import ACCURACY, CORRECT, LOSS, Manifest, own_data_hash
from node.protocols.run_file import RunFile, TrainTable
from partition.model.graph import Entry, Graph, Size, TensorType
from partition.model.sizes import bind
from partition.plan.plan import STEPS_MAX
from partition.run.local_settings import LocalSettings, OwnData
from partition.stage import IN_FLIGHT_MAX
from partition.steps.validation import ValidationSettings

WINDOW = 64
"""Bytes of text in a sample if neither the person nor the model gives a length."""
VALIDATIONS_WANTED = 20
"""Number of validations of a run if the person gives no interval."""
_NAME_LENGTH_MAX = 40


def window_of(run_file: RunFile, graph: Graph, name: str) -> int:
    """Return the length of a text sample: the person's, else the model's. Raises UsageError."""
    if run_file.train.window:
        return run_file.train.window
    entry = _trained(graph, name)
    shape = graph.types[entry.inputs[0].type].shape
    if len(shape) != 2 or len(entry.inputs) != 1:
        return WINDOW  # the data is not text, or the mismatch is reported when it is bound
    side = shape[1]
    if not isinstance(side, Size):
        return side
    symbols = [symbol for row, symbol in enumerate(graph.symbols) if row == side.row]
    return min([WINDOW, *(symbol.maximum for symbol in symbols)])


def make_manifest(
    run_file: RunFile,
    graph: Graph,
    graph_name: bytes,
    dataset: Dataset,
    *,
    name: str,
    created: float,
    own_data: OwnData | None = None,
    is_of_tokens: bool = False,
) -> Manifest:
    """Return the manifest of a run. `name` is the name of RUN.toml in errors, `created` is in Unix seconds.
    For a federated run, `own_data` is the data that every member must have of its own. `is_of_tokens`: the
    arrays were made from text in windows. Raises UsageError."""
    run_file = _with_steps(run_file, dataset, name)
    train = run_file.train
    microbatch, recompute, frames = train.microbatch, train.recompute, train.frames
    if microbatch == "auto" or recompute == "auto" or frames == "auto" or train.mode == "auto":
        raise UsageError(f'{name}: what is "auto" has to be chosen before a manifest is made')
    _check_stages(run_file.plan.stages, len(graph.layers), name)
    _check_window(run_file, is_of_text=bool(dataset.window or is_of_tokens), name=name)
    _check_microbatch(train.batch, microbatch, graph, name)
    sizes = bind_data(graph, dataset, microbatch, name)
    entry = train_entry(graph)
    manifest = Manifest(
        model=word(graph.name),
        graph=graph_name.hex(),
        data=dataset.digest if own_data is None else own_data_hash(own_data),
        test_samples=_held_out(dataset.test_samples, graph, microbatch),
        steps=train.steps,
        microbatch=microbatch,
        microbatches=train.batch // microbatch,
        sizes=tuple(sizes[1:]),
        metrics=tuple(metric.name for metric in entry.metrics),
        optimizer=run_file.optimizer,
        autocast=train.autocast,
        recompute=recompute,
        seed=train.seed,
        frames=frames,
        stages=run_file.plan.stages,
        replicas=run_file.plan.replicas,
        created_milliseconds=int(created * 1000),
        trainers=run_file.plan.trainers,
        window=dataset.window,
        pipeline=run_file.plan.pipeline,
        save_every=run_file.plan.checkpoint_every,
        on_lost_quorum=run_file.plan.on_lost_quorum,
        on_divergence=run_file.train.on_divergence,
        local=_local(run_file, own_data),
        validation_samples=_validated(dataset, graph, microbatch),
        validation=_validation(run_file, dataset, entry, name),
        place=run_file.place,
        together=layers_together(run_file, graph, name),
        replicas_min=run_file.plan.replicas_min,
        objective=run_file.plan.objective,
        standbys=run_file.plan.standbys if run_file.plan.objective == "throughput" else 0,
    )
    _check_admission(manifest, graph, name)
    _check_frames(manifest, train.batch, graph, name)
    return manifest


def _check_stages(stages: int, layers: int, name: str) -> None:
    """Refuse more stages than layers, which no number of peers could change. Raises UsageError."""
    if stages > layers:
        raise UsageError(
            f"{name}: plan.stages {stages}: the model can only be cut between its {layers} layers",
            f"use plan.stages = {layers} at most; 0 uses as many stages as pay off",
        )


def _check_window(run_file: RunFile, *, is_of_text: bool, name: str) -> None:
    """Refuse a window for data that is not text. Raises UsageError."""
    if run_file.train.window and not is_of_text:
        raise UsageError(
            f"{name}: train.window: has no effect on {run_file.data}, which is not text",
            "leave train.window out",
        )


def _check_admission(manifest: Manifest, graph: Graph, name: str) -> None:
    """Refuse a model that no provider would accept for this manifest. Raises UsageError."""
    try:
        check_model(manifest, graph)
    except RemoteProtocolError as error:
        raise UsageError(f"{name}: model: {error}") from None


def _check_microbatch(batch: int, microbatch: int, graph: Graph, name: str) -> None:
    """Refuse a batch that cannot be split into micro-batches small enough for the model. Raises
    UsageError."""
    most = graph.symbols[0].maximum
    if microbatch > most and batch > most * IN_FLIGHT_MAX:
        raise _too_large(f"{name}: train.batch {batch}: the model takes {most} samples at once", most)


def _check_frames(manifest: Manifest, batch: int, graph: Graph, name: str) -> None:
    """Refuse a micro-batch whose inputs are too large for a frame. Raises UsageError."""
    size, microbatch = input_frame_bytes(manifest, graph), manifest.microbatch
    if size <= FRAME_BYTES_MAX:
        return
    most = FRAME_BYTES_MAX * microbatch // size
    what = (
        f"{name}: train.microbatch {microbatch}: its inputs are {size / 1e6:.0f} MB, and a frame holds"
        f" {FRAME_BYTES_MAX / 1e6:.0f}"
    )
    if not most:
        raise UsageError(f"{what}; one sample alone is too large")
    if batch > most * IN_FLIGHT_MAX:
        raise _too_large(what, most)
    least = -(-batch // IN_FLIGHT_MAX)
    fitting = [each for each in range(most, least - 1, -1) if batch % each == 0]
    raise UsageError(
        what, f"train.microbatch = {fitting[0]}" if fitting else f"train.batch = {most * IN_FLIGHT_MAX}"
    )


def _too_large(what: str, microbatch: int) -> UsageError:
    """Return the error for a batch that no micro-batch size makes fit, with values of both that would fit."""
    return UsageError(
        f"{what}, and a step has at most {IN_FLIGHT_MAX} micro-batches",
        f"train.microbatch = {microbatch} and train.batch = {microbatch * IN_FLIGHT_MAX} at most",
    )


def _local(run_file: RunFile, own_data: OwnData | None) -> LocalSettings | None:
    found = run_file.local
    return found if found is None else replace(found, own_data=own_data)


def _with_steps(run_file: RunFile, dataset: Dataset, name: str) -> RunFile:
    """Return the run file with epochs, if it gives any, converted to a number of steps. Raises UsageError."""
    train = run_file.train
    if not train.epochs:
        return run_file
    steps = max(1, ceil(train.epochs * dataset.train_samples / train.batch))
    if steps > STEPS_MAX:
        raise UsageError(f"{name}: train.epochs {train.epochs:g} are {steps} steps; at most {STEPS_MAX}")
    if train.schedule != "constant" and train.warmup_steps >= steps:
        raise UsageError(
            f"{name}: train.warmup_steps {train.warmup_steps}: train.epochs {train.epochs:g} are only {steps}"
            " steps"
        )
    return replace(run_file, train=replace(train, steps=steps))


def _validation(run_file: RunFile, dataset: Dataset, entry: Entry, name: str) -> ValidationSettings | None:
    """Return the settings of the validations of a run in exact mode; None if it has none. Raises
    UsageError."""
    train, usual = run_file.train, TrainTable()
    if train.mode != "exact":
        return None
    if not dataset.validation_samples:
        keys = "validate_every", "watch", "keep", "patience", "improvement"
        asked = [key for key in keys if getattr(train, key) != getattr(usual, key)]
        if asked:
            raise UsageError(
                f"{name}: train.{asked[0]}: the data has no validation samples",
                f"leave {asked[0]} out; or set splits.validation_share = 0.1 for a table, arrays or images",
            )
        return None
    metrics = [metric.name for metric in entry.metrics]
    is_less, watched = train.watch.startswith("-"), train.watch.removeprefix("-")
    watched = CORRECT if watched == ACCURACY else watched
    if watched not in (LOSS, *metrics):
        known = [ACCURACY if metric == CORRECT else metric for metric in metrics]
        raise UsageError(f"{name}: train.watch {train.watch!r}: the model has {', '.join([LOSS, *known])}")
    return ValidationSettings(
        every=train.validate_every or ceil(train.steps / VALIDATIONS_WANTED),
        patience=train.patience,
        improvement=train.improvement,
        watched=0 if watched == LOSS else 1 + metrics.index(watched),
        more_is_better=watched != LOSS and not is_less,
        keep=train.keep,
    )


def _validated(dataset: Dataset, graph: Graph, microbatch: int) -> int:
    return _held_out(dataset.validation_samples, graph, microbatch) if dataset.validation_samples else 0


def _held_out(count: int, graph: Graph, microbatch: int) -> int:
    """Return the number of held-out samples to use. A remainder too small for a batch of the model is left
    out."""
    rest = count % microbatch
    return count if rest == 0 or rest >= graph.symbols[0].minimum or count == rest else count - rest


def columns_of(graph: Graph, dataset: Dataset, name: str) -> tuple[list[str], list[str]]:
    """Return the names of the arrays for inputs and for labels, in the order of the model's ports. They are
    the arrays with the ports' names. A single input may also be named x, and a single label y. If samples
    came as tuples, they are all arrays in order. Raises UsageError."""
    entry = _trained(graph, name)
    found: tuple[list[str], list[str]] = ([], [])
    count = len(entry.inputs) + len(entry.labels)
    if list(dataset.train) == [f"{ITEM}{place}" for place in range(count)]:
        # Samples that came as tuples have their tensors in the model's order.
        items = list(dataset.train)
        return items[: len(entry.inputs)], items[len(entry.inputs) :]
    for ports, alone, names in ((entry.inputs, "x", found[0]), (entry.labels, "y", found[1])):
        for port in ports:
            wanted = port.name if port.name in dataset.train else alone if len(ports) == 1 else ""
            if wanted not in dataset.train:
                takes = ", ".join(each.name for each in (*entry.inputs, *entry.labels))
                raise UsageError(
                    f"{name}: the model takes {takes}; the data has {', '.join(dataset.train)}",
                    "name the arrays of train.npz and test.npz like the model's inputs and labels",
                )
            names.append(wanted)
    return found


def bind_data(graph: Graph, dataset: Dataset, microbatch: int, name: str) -> tuple[int, ...]:
    """Return the values of the graph's symbols for micro-batches of this data. Raises UsageError if data and
    model do not fit."""
    entry = _trained(graph, name)
    kinds = [graph.types[port.type] for port in (*entry.inputs, *entry.labels)]
    inputs, labels = columns_of(graph, dataset, name)
    named = [(what, dataset.train[what]) for what in (*inputs, *labels)]
    shapes = []
    for (what, array), kind in zip(named, kinds, strict=True):
        if array.dtype.kind == "f" and not kind.dtype.startswith("float"):
            raise UsageError(f"{name}: the model takes {what} of {kind.dtype}, the data's are {array.dtype}")
        if kind.dtype == "bfloat16" or kind.dtype.startswith("complex"):
            raise UsageError(f"{name}: the model takes {what} of {kind.dtype}, which data cannot have")
        if len(kind.shape) != array.ndim:
            raise UsageError(f"{name}: {_unlike(what, kind, graph, array)}")
        shapes.append((microbatch, *array.shape[1:]))
    batch = graph.symbols[0]
    if not batch.minimum <= microbatch <= batch.maximum:
        bounds = (
            f"{batch.minimum} to {batch.maximum}" if batch.minimum < batch.maximum else f"{batch.minimum}"
        )
        raise UsageError(
            f"{name}: train.microbatch {microbatch}: the model takes {bounds} samples at once",
            f"train.microbatch = {min(max(microbatch, batch.minimum), batch.maximum)}",
        )
    try:
        return bind(graph.symbols, graph.expressions, kinds, shapes)
    except RemoteProtocolError as error:
        for (what, array), kind in zip(named, kinds, strict=True):
            pairs = zip(kind.shape[1:], array.shape[1:], strict=True)
            if any(not isinstance(side, Size) and side != given for side, given in pairs):
                remedy = _other_length(kind, dataset)
                raise UsageError(f"{name}: {_unlike(what, kind, graph, array)}", remedy) from None
        raise UsageError(f"{name}: this data does not fit the model: {error}") from None


def _other_length(kind: TensorType, dataset: Dataset) -> str | None:
    """Return advice for text or token samples whose length differs from that of the captured model."""
    side = kind.shape[1] if len(kind.shape) == 2 else None
    if not isinstance(side, int):
        return None
    if dataset.window:
        return f"train.window = {side}"
    return f"train.window = {side} if a text becomes tokens; or samples of {side} numbers"


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


def _trained(graph: Graph, name: str) -> Entry:
    try:
        return train_entry(graph)
    except RemoteProtocolError as error:
        raise UsageError(f"{name}: model: {error}", "capture it with a loss") from None


def fits(dataset: Dataset, manifest: Manifest, graph: Graph) -> bool:
    """Return whether this data is the data that a manifest was made for."""
    try:
        sizes = bind_data(graph, dataset, manifest.microbatch, manifest.model)
    except UsageError:
        return False
    is_same = (dataset.digest, sizes) == (manifest.data, manifest.sizes_max)
    is_enough = dataset.validation_samples >= manifest.validation_samples
    return is_same and is_enough and dataset.test_samples >= manifest.test_samples


def make_batches(dataset: Dataset, manifest: Manifest, graph: Graph) -> Batches:
    """Return micro-batches of data that `fits`, in the number types that the model takes."""
    entry = train_entry(graph)
    columns = [
        [(name, graph.types[port.type].dtype) for name, port in zip(names, ports, strict=True)]
        for names, ports in zip(
            columns_of(graph, dataset, manifest.model), (entry.inputs, entry.labels), strict=True
        )
    ]
    return Batches(
        dataset,
        microbatch=manifest.microbatch,
        seed=manifest.seed,
        inputs=columns[0],
        labels=columns[1],
        validated=manifest.validation_samples if manifest.validation else 0,
    )


def word(name: str) -> str:
    """Return a model's name as manifests and screens show it."""
    clean = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:_NAME_LENGTH_MAX]
    return clean or "model"
