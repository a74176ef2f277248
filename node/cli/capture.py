"""Capture the `model` of a RUN.toml into a graph in a folder, before `train` asks the node.

Only this part of a run needs torch in the command's own process, for built-in models and for a user's own
factory. A FILE.peerloom is already captured, so only its path is passed on.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

from crypto.errors import RemoteProtocolError
from node.cli.languages import LENGTH, language_of, model_folder_of, sample_length
from node.cli.options import GRAPH_SUFFIX, VALUES_SUFFIX
from node.cli.temporary import command_folder
from node.content import datasets as datasets
from node.content.fenced_reading import convert_fenced
from node.content.model_folder import is_model_folder
from node.content.reading import SourceReading, describe, read_reading
from node.content.samples import write_samples
from node.content.sources import SourceWish, Tell, check_form, is_source, is_table_by_keys
from node.errors import UsageError
from node.protocols.data_table import DataTable
from node.protocols.run_file import RunFile, SplitsTable
from node.runs.manifest_builder import WINDOW
from node.serving.proof_process import MIXES_DO
from node.suggest import did_you_mean
from partition.model.graph import decode_graph, encode_graph
from partition.model.groups import with_groups

Load = Callable[[], datasets.Dataset]
DATA_SEED = 20
"""Seed for random draws in a user's own data, such as augmentations, so that they are repeatable."""
LOOKED_AT_BYTES_MAX = 1 << 30
"""Maximum size of arrays that a run uses unchanged for which they are also unpacked here, in order to
describe them."""
_GRAPH_NAME = f"model{GRAPH_SUFFIX}"


def prepare_data(
    run_file: RunFile, base: Path, folder: Path, name: str, tell: Tell = lambda _: None
) -> SourceReading | None:
    """Convert the data of a run to arrays in `folder`, and return its reading. Return None if a run reads
    this form unchanged.

    `base` is the folder of RUN.toml; errors call the file `name`. Raises UsageError.
    """
    splits, source, keys = run_file.splits, run_file.source, run_file.data_keys
    language = language_of(run_file, base, name)
    is_converted = ".py:" not in source and (language is not None or _is_converted(run_file, base))
    if ".py:" not in source and not is_converted:
        check_form(base / Path(source).expanduser(), keys)
    if splits != SplitsTable() and not is_converted:
        raise UsageError(
            f"{name}: splits: {source} determines its parts itself",
            "return a pair of data sets from the function; or use a table, arrays, or a folder of images",
        )
    as_bytes = DataTable(source, form="bytes")
    if keys not in (DataTable(source), as_bytes) and not is_converted:
        raise UsageError(
            f"{name}: data: {source} can be read in only one way",
            f'set data = "{source}", and no other key of [data]',
        )
    if ".py:" in source:
        _run_own_data(str(base / Path(source).expanduser()), folder, f"{name}: data")
        return _own_reading(source, folder)
    if not is_converted:
        return None
    wish = SourceWish(
        source,
        base,
        keys,
        splits.test or splits.test_share,
        splits.validation or splits.validation_share,
        language=language,
    )
    try:
        return convert_fenced(wish, folder, tell)
    except UsageError as error:
        raise UsageError(f"{name}: {error.written[0]}", error.written[1]) from None


def loading(run_file: RunFile, base: Path, tell: Tell = lambda _: None) -> Load:
    """Return a function that reads a run's data when it is first called."""
    window = run_file.train.window or WINDOW
    return cache(partial(datasets.load, run_file.source, base, window=window, tell=tell))


def reading_as_is(run_file: RunFile, base: Path, load: Load) -> SourceReading:
    """Return the reading of data that a run uses unchanged: a text, arrays, the digits. Raises UsageError."""
    path = datasets.path_of(run_file.source, base)
    if path.is_dir() and sum(each.stat().st_size for each in path.glob("*.npz")) > LOOKED_AT_BYTES_MAX:
        return SourceReading(run_file.source, "arrays of numbers, too large to examine")
    dataset = load()
    form = f"text, its bytes in windows of {dataset.window}" if dataset.window else "arrays of numbers"
    reading = SourceReading(run_file.source, form, "the same bytes, shifted by one" if dataset.window else "")
    describe(reading, dataset.parts)
    return reading


def _own_reading(source: str, folder: Path) -> SourceReading:
    """Describe the samples of a user's own function."""
    reading = SourceReading(source, "samples of a function")
    describe(reading, datasets.load_folder(folder).parts)
    return reading


def _is_converted(run_file: RunFile, base: Path) -> bool:
    path = base / Path(run_file.source).expanduser()
    if run_file.data_keys.form == "bytes":
        return False
    if path.is_file() and is_table_by_keys(run_file.data_keys):
        return True
    is_folder = (path / "train.npz").exists()
    return is_source(run_file.source, base) or (is_folder and run_file.splits != SplitsTable())


def _run_own_data(reference: str, folder: Path, where: str) -> None:
    """Return the samples of a user's own function. Raises UsageError."""
    from partition.capture.errors import CaptureRefused
    from partition.capture.task import call_seeded, load_factory

    try:
        source = call_seeded(load_factory(reference), DATA_SEED)
    except CaptureRefused as error:
        raise UsageError(f"{where}: {error}") from None
    write_samples(source, folder, where)


@contextmanager
def captured(run_file: RunFile, path: Path, name: str, load: Load | None = None) -> Iterator[dict[str, str]]:
    """Yield the files of a run's graph and initial values, as arguments for the node. The files exist only
    inside this context.

    Other paths are relative to `path`, the path of RUN.toml; errors call the file `name`. `load` reads its
    data, and shares the result with other users.

    Raises:
        UsageError: there is no such model, or it cannot be captured.
    """
    if run_file.model.endswith(GRAPH_SUFFIX):
        graph = path.parent / Path(run_file.model).expanduser()
        if not graph.is_file():
            raise UsageError(f"{name}: model: there is no file {graph}", "make it: `peerloom model capture`")
        with command_folder() as folder:
            yield _arguments(graph) | _regrouped(graph, run_file, folder, name)
        return
    with command_folder() as folder:
        graph = folder / _GRAPH_NAME
        capture_to(graph, run_file, path, name, load)
        model = path.parent / Path(run_file.model).expanduser()
        came_from = {"folder": str(model.absolute())} if is_model_folder(model) else {}
        yield _arguments(graph) | _regrouped(graph, run_file, folder, name) | came_from


def _arguments(graph: Path) -> dict[str, str]:
    values = graph.with_suffix(VALUES_SUFFIX)
    found = {"graph": str(graph.absolute())}
    return found | ({"values": str(values.absolute())} if values.is_file() else {})


def _regrouped(graph: Path, run_file: RunFile, folder: Path, name: str) -> dict[str, str]:
    """Return the graph with its parameters in the groups of the run, if it has any. Raises UsageError."""
    if not run_file.train.groups:
        return {}
    try:
        found = with_groups(
            decode_graph(graph.read_bytes()), [table.match for table in run_file.train.groups]
        )
    except (RemoteProtocolError, ValueError) as error:
        raise UsageError(f"{name}: train.groups: {error}") from None
    target = folder / f"grouped{GRAPH_SUFFIX}"
    target.write_bytes(encode_graph(found))
    return {"graph": str(target.absolute())}


def capture_to(graph: Path, run_file: RunFile, path: Path, name: str, load: Load | None = None) -> None:
    """Capture a built-in model, a Hugging Face folder, or a function's model into the file `graph`.

    Raises:
        UsageError: there is no such model, or it cannot be captured.
    """
    from partition.capture import CaptureRefused
    from partition.capture.models import BUILTIN
    from partition.capture.models.model_spec import capture_built_in, capture_folder, capture_own
    from partition.capture.weights import write_weights

    train = run_file.train
    try:
        if ".py:" in run_file.model:
            own = path.parent / Path(run_file.model).expanduser()
            found = capture_own(str(own), dtype=train.dtype, options=run_file.options)
        elif is_model_folder(folder := path.parent / Path(run_file.model).expanduser()):
            options = dict(run_file.options)
            model = model_folder_of(run_file, path.parent)
            if model is not None and model.is_of_text:
                length = sample_length(run_file, path.parent, name)
                options |= {LENGTH: length} if length else {}
            found = capture_folder(str(folder), dtype=train.dtype, options=options)
        elif run_file.model in BUILTIN:
            shape, classes = _sample_and_classes(
                run_file, path.parent, load or loading(run_file, path.parent)
            )
            found = capture_built_in(
                run_file.model, shape, classes, dtype=train.dtype, options=run_file.options
            )
        else:
            known = sorted(BUILTIN)
            near = did_you_mean(run_file.model, known)
            raise UsageError(
                f"{name}: model: no model is called '{run_file.model[:80]}'{near}",
                f"{', '.join(known)}; a captured FILE.peerloom; PATH.py:FUNCTION; or a Hugging Face folder",
            )
        graph.write_bytes(found.data)
        if found.stored:
            write_weights(graph.with_suffix(VALUES_SUFFIX), found)
    except (CaptureRefused, OSError) as error:
        raise UsageError(f"{name}: model: {error}") from None


def _sample_and_classes(run_file: RunFile, base: Path, load: Load) -> tuple[tuple[int, ...], int]:
    """Return the shape of a sample, and the number of classes of a built-in model. Raises UsageError."""
    if run_file.source == datasets.DIGITS_NAME:
        return datasets.DIGITS_SAMPLE_SHAPE, datasets.DIGITS_CLASSES
    dataset = load()
    reading = read_reading(datasets.path_of(run_file.source, base))
    if reading is not None and reading.vocabulary:
        return dataset.sample_shape, reading.vocabulary
    words = reading.words if reading is not None else []  # the last classes may have no sample
    return dataset.sample_shape, max(dataset.classes, len(words))


@contextmanager
def captured_to_serve(model: str) -> Iterator[str]:
    """Yield the file of a graph to be served, while the node stores and proves it: `model` itself, or the
    graph captured from a transformers folder. Raises UsageError if the folder cannot be captured, or the
    graph's answers differ from the model's."""
    path = Path(model).expanduser().absolute()
    if not is_model_folder(path):
        yield str(path)
        return
    from partition.capture import CaptureRefused
    from partition.capture.serving import capture_folder_for_serving
    from partition.capture.serving_proof import ServingDiffers
    from partition.capture.weights import write_weights

    with command_folder() as folder:
        graph = folder / (path.name + GRAPH_SUFFIX)
        try:
            found = capture_folder_for_serving(path)
            graph.write_bytes(found.data)
            write_weights(graph.with_suffix(VALUES_SUFFIX), found)
        except ServingDiffers as error:
            raise UsageError(f"{model}: this model cannot be served: {error}", MIXES_DO) from None
        except CaptureRefused as error:
            raise UsageError(f"{model}: {error}") from None
        except OSError as error:
            raise UsageError(f"{model}: {(error.strerror or str(error)).lower()}") from None
        yield str(graph)
