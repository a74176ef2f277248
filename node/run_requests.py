"""Turns what the command `train` or a program has prepared into a signed run.

It learns the run's model and data, chooses what the person left open, and reports inconsistencies in terms of
the person's files.
"""

from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from crypto.errors import RemoteProtocolError
from node import state as views
from node import state_documents
from node.content import datasets as datasets
from node.content.datasets import Dataset
from node.content.kept_folders import keep_folder
from node.content.reading import SourceReading, kept_name, read_reading
from node.content.sources import called, data_names
from node.errors import RunFailed, UsageError
from node.local.stages import check_columns
from node.planning.choices import choose, has_open
from node.planning.peers import live_peers
from node.protocols.manifest import Manifest, Run, make_run
from node.protocols.run_file import COMMON, RunFile, read_run_file
from node.requests import Prepared
from node.runs.data_check import check_values
from node.runs.manifest_builder import bind_data, make_manifest, window_of
from node.runs.own_data import own_data_like
from node.runs.runs import Runs
from node.seams import Seams
from node.services.measurements import Measurements
from node.services.membership import Membership
from partition.model.graph import Graph
from partition.plan.problem import Infeasible
from partition.run.messages import REASON_LENGTH_MAX


class RequestingNode(Protocol):
    """The part of `node.runtime.Node` that run requests use."""

    seams: Seams
    measurements: Measurements
    membership: Membership
    runs: Runs
    signer: Any

    @property
    def state(self) -> views.State: ...


def run_file_of(prepared: Prepared) -> RunFile:
    """Return the requested run: either already checked by the command, or read from the text of a RUN.toml.
    Raises UsageError."""
    if prepared.run is None:
        return read_run_file(prepared.text, prepared.name)
    try:
        found: RunFile = msgspec.convert(prepared.run, RunFile)
    except msgspec.ValidationError as error:
        what = f"{prepared.name}: the command did not send a valid run: {error}"
        raise UsageError(what, "is it of another version?") from None
    return found


async def make_signed_run(node: RequestingNode, run_file: RunFile, prepared: Prepared) -> tuple[Run, str]:
    """Sign a manifest for what the command captured. Return the run, and the reasons for what was chosen for
    the person. Raises UsageError, RunFailed."""
    name = prepared.name
    if not prepared.graph:
        raise UsageError(f"{name}: the command sent no captured model; is it of another version?")
    graph_hash, graph = await node.runs.models.learn(
        Path(prepared.graph), Path(prepared.values) if prepared.values else None
    )
    window = window_of(run_file, graph, name)
    base = Path(prepared.path or name).parent
    shown, is_own = run_file.source, run_file.train.federated
    if prepared.data:  # the command has converted the data
        run_file = replace(run_file, data=prepared.data)
    if run_file.source == datasets.DIGITS_NAME:
        dataset = await node.seams.executor.run(datasets.load_digits)
    else:
        path = datasets.path_of(run_file.source, base)
        read = node.runs.own_data.read if is_own else node.runs.data.learn
        with called(data_names(str(path), shown) if prepared.data else {}):
            dataset = await read(path, window=window)
    chosen = ""
    if has_open(run_file):
        run_file, chosen = await _choose(node, run_file, graph, dataset, name)
    run_file, on_common = _with_common_devices(node, run_file, name)
    chosen = "; ".join(filter(None, (chosen, on_common)))[:REASON_LENGTH_MAX]
    created = node.seams.swarm_clock.wall()
    own_data = own_data_like(dataset, shown, name) if is_own else None
    reading = await _read_reading(node, prepared.data)
    manifest = make_manifest(
        run_file,
        graph,
        graph_hash,
        dataset,
        name=name,
        created=created,
        own_data=own_data,
        is_of_tokens=reading is not None and reading.window > 0,
    )
    await node.seams.executor.run(partial(check_columns, manifest, graph, name), apart=True)
    await node.seams.executor.run(partial(_check, graph, dataset, manifest, prepared, shown))
    if run_file.source != datasets.DIGITS_NAME and not is_own:
        try:
            path = datasets.path_of(run_file.source, base)
            await node.runs.data.keep(dataset.digest, path, window=dataset.window)
        except OSError as error:
            raise UsageError(f"{name}: the data could not be kept: {error.strerror or error}") from None
    try:
        run = make_run(node.signer, manifest)
    except RemoteProtocolError as error:  # other nodes would refuse the manifest too
        raise UsageError(f"{name}: this data and these settings do not make a valid run: {error}") from None
    if is_own:
        node.runs.own_data.hold(run.id, dataset)
    await _keep_reading(node, run, reading)
    await _keep_folder(node, run, prepared.folder)
    return run, chosen


async def _read_reading(node: RequestingNode, converted: str) -> SourceReading | None:
    """Return how the command has read the run's data; None if the command has not converted it."""
    if not converted:
        return None
    return await node.seams.executor.run(partial(read_reading, Path(converted)))


def _with_common_devices(node: RequestingNode, run_file: RunFile, name: str) -> tuple[RunFile, str]:
    """Replace the device "common" with the kinds of devices nearby, the most frequent first. Return the run
    file and a text that names the kinds. Raises RunFailed if there are none."""
    if run_file.plan.devices != (COMMON,):
        return run_file, ""
    found = node.runs.places.devices_near(node.runs.offers())
    if not found:
        raise RunFailed(
            f"{name}: plan.devices {COMMON}: no peer with a free slot is known", "`peerloom peers`"
        )
    told = ", ".join(f"{count} on {kind}" for kind, count in found)
    kinds = tuple(kind for kind, _ in found)
    return replace(run_file, plan=replace(run_file.plan, devices=kinds)), f"devices near by: {told}"


async def _keep_reading(node: RequestingNode, run: Run, reading: SourceReading | None) -> None:
    """Store how the run's data was read, so that `predict` knows the names of the classes. Raises
    UsageError."""
    if reading is None:
        return
    try:
        write = partial(node.seams.storage.write, kept_name(run.text), msgspec.json.encode(reading))
        await node.seams.executor.run(write)
    except OSError as error:
        raise UsageError(
            f"the record of how the data was read could not be stored: {error.strerror or error}"
        ) from None


async def _keep_folder(node: RequestingNode, run: Run, folder: str) -> None:
    """If the model came as a Hugging Face folder, store the files that `runs fetch` writes next to the
    weights."""
    if not folder:
        return
    try:
        await node.seams.executor.run(partial(keep_folder, node.seams.storage, run.text, Path(folder)))
    except OSError as error:
        raise UsageError(f"{folder}: could not be kept: {error.strerror or error}") from None


def _check(graph: Graph, dataset: Dataset, manifest: Manifest, prepared: Prepared, shown: str) -> None:
    """Check that the data's values fit the model. Raises UsageError."""
    origins = datasets.read_origins(Path(prepared.data)) if prepared.data else {}
    check_values(graph, dataset, manifest.sizes_max, prepared.name, shown, origins)


async def _choose(
    node: RequestingNode, run_file: RunFile, graph: Graph, dataset: Dataset, name: str
) -> tuple[RunFile, str]:
    """Fill in what the person left open. Return the run file and the reasons for the choices. Raises
    UsageError, RunFailed."""
    now = node.seams.clock.wall()
    measured = await node.measurements.document(node.membership.live)
    status = state_documents.status_document(node.state, now, {})
    peers = live_peers(status, state_documents.peers_document(node.state, now), measured)
    least = graph.symbols[0].minimum if graph.symbols else 1
    sizes = bind_data(graph, dataset, max(1, least), name)[1:]
    try:
        work = partial(choose, run_file, graph, sizes, peers)
        found, reasons = await node.seams.executor.run(work, apart=True)
    except Infeasible as infeasible:
        raise RunFailed(f"{name}: {infeasible}", infeasible.do or None) from None
    return found, f"chosen: {'; '.join(reasons)}"[:REASON_LENGTH_MAX]
