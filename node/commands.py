"""What the node on this machine does for its own client commands, over the control channel."""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import trio

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node import state as views
from node import toml
from node.control import CommandHandler, Emit
from node.errors import PeerloomError, RunFailed, Unreachable, UsageError
from node.events import RunEnded
from node.runs import data as datasets
from node.runs.manifest import Run, RunFile, check_run_file, make_run
from node.runs.placement import NotPlaced
from node.runs.runs import Runs
from node.runs.submission import make_manifest, window_of
from node.runs.weights import WEIGHTS_PURPOSE, fetch_weights, weights_name
from node.seams import Seams
from node.services.discovery import Discovery
from node.services.membership import Membership
from partition.plan.plan import planner_of

RUN_PURPOSE = "run"
RUN_TEXT_LENGTH = 16


class LocalNode(Protocol):
    """What commands need of `node.runtime.Node`."""

    peer: PeerId
    state: views.State
    seams: Seams
    membership: Membership
    discovery: Discovery
    runs: Runs
    stopping: trio.Event
    signer: Any

    @property
    def counters(self) -> dict[str, int]: ...
    def watch(self) -> Any: ...


class Commands:
    """The handlers, by command name."""

    def __init__(self, node: LocalNode) -> None:
        self._node = node

    @property
    def handlers(self) -> Mapping[str, CommandHandler]:
        """For `node.control.ControlServer`."""
        return {
            "status": self._status,
            "peers": self._peers,
            "events": self._events,
            "leave": self._leave,
            "train": self._train,
            "runs.fetch": self._fetch,
        }

    async def _status(self, arguments: dict[str, Any], emit: Emit) -> object:  # noqa: ARG002
        node = self._node
        return views.status_document(node.state, node.seams.clock.wall(), node.counters)

    async def _peers(self, arguments: dict[str, Any], emit: Emit) -> object:  # noqa: ARG002
        return views.peers_document(self._node.state, self._node.seams.clock.wall())

    async def _leave(self, arguments: dict[str, Any], emit: Emit) -> object:  # noqa: ARG002
        self._node.stopping.set()
        return {}

    async def _events(self, arguments: dict[str, Any], emit: Emit) -> object:  # noqa: ARG002
        """Every event from now on, until the client hangs up."""
        with self._node.watch() as events:
            async for event in events:
                await emit(views.event_document(event))
        return {}

    async def _train(self, arguments: dict[str, Any], emit: Emit) -> object:
        node = self._node
        name, text = str(arguments.get("name", "RUN.toml")), str(arguments.get("text", ""))
        run_file = toml.parse(text, RunFile, name=name).value
        check_run_file(run_file, name)
        run = await self._make_run(run_file, arguments, name)
        node.runs.start_task(self._publish_run, run)
        if not arguments.get("follow", True):
            await self._submit(run)
            return {"run": run.text, "status": "running"}
        with node.watch() as events:
            # Not in this task: a client that hangs up stops watching, never the placing.
            node.runs.start_task(self._submit_watched, run)
            async for event in events:
                if getattr(event, "run", None) != run.text:
                    continue
                await emit(views.event_document(event))
                if isinstance(event, RunEnded):
                    return views.run_document(node.state.runs[run.text])
        raise PeerloomError("the node is stopping")

    async def _publish_run(self, run: Run) -> None:
        """Put the manifest into the DHT, where it outlives this node's memory of it."""
        await self._node.discovery.publish(RUN_PURPOSE, run.id, run.fact.body)

    async def _submit_watched(self, run: Run) -> None:
        with suppress(RunFailed):  # its end is an event, which the watcher sees
            await self._submit(run)

    async def _submit(self, run: Run) -> None:
        node = self._node
        planner = planner_of(node.membership.live)
        try:
            await node.runs.submit(run, planner)
        except NotPlaced as error:
            raise RunFailed(f"run {run.text[:8]} was not placed: {error}") from None
        except Unreachable as error:
            raise RunFailed(f"the planner of run {run.text[:8]} did not answer: {error.detail}") from None

    async def _make_run(self, run_file: RunFile, arguments: Mapping[str, Any], name: str) -> Run:
        """Take what the command captured, and sign a manifest for it. Raises UsageError."""
        node = self._node
        if not arguments.get("graph"):
            raise UsageError(f"{name}: the command sent no captured model; is it of another version?")
        values = arguments.get("values")
        graph_hash, graph = await node.runs.models.learn(
            Path(str(arguments["graph"])), Path(str(values)) if values else None
        )
        window = window_of(run_file, graph, name)
        base = Path(str(arguments.get("path", name))).parent
        dataset = await node.seams.executor.run(lambda: datasets.load(run_file.data, base, window=window))
        if run_file.data != datasets.DIGITS_NAME:
            node.runs.learn_data(dataset.digest, datasets.path_of(run_file.data, base), window)
        created = node.seams.clock.wall()
        manifest = make_manifest(run_file, graph, graph_hash, dataset, name=name, created=created)
        try:
            return make_run(node.signer, manifest)
        except RemoteProtocolError as error:  # no other node would take it either
            raise UsageError(f"{name}: this data and these numbers make no run: {error}") from None

    async def _fetch(self, arguments: dict[str, Any], emit: Emit) -> object:  # noqa: ARG002
        """Weights of a run: from this node's own disk, else from any peer that keeps them."""
        node = self._node
        run = self._find_run(str(arguments.get("run", "")))
        out = Path(str(arguments["out"]))
        view = node.state.runs.get(run)
        if view is not None and view.status not in ("done", "failed"):
            raise RunFailed(f"run {run[:8]} has not ended: step {view.step} of {view.steps}")
        data = await node.seams.executor.run(lambda: node.seams.storage.read(weights_name(run)))
        if data is None:
            digest, holders = await self._holders(run, view.weights if view is not None else "")
            try:
                data = await fetch_weights(node.seams, run, holders, digest)
            except Unreachable as error:
                raise RunFailed(f"nobody handed over the weights of run {run[:8]}: {error.detail}") from None
        found = data
        try:
            await node.seams.executor.run(lambda: out.write_bytes(found))
        except OSError as error:
            raise UsageError(f"--out {out}: {(error.strerror or str(error)).lower()}") from None
        return {"run": run, "out": str(out), "size_bytes": len(data)}

    def _find_run(self, prefix: str) -> str:
        known = [run for run in self._node.state.runs if run.startswith(prefix)] if prefix else []
        if len(known) == 1:
            return known[0]
        if len(known) > 1:
            raise UsageError(f"run {prefix}: {len(known)} runs begin so; give more of the id")
        if len(prefix) == RUN_TEXT_LENGTH and all(letter in "0123456789abcdef" for letter in prefix):
            return prefix
        raise UsageError(
            f"run '{prefix[:40]}' is not known here", "look: python -m node runs, or give the whole id"
        )

    async def _holders(self, run: str, digest: str) -> tuple[str, list[PeerId]]:
        """Who says in the DHT to keep the weights with this hash; not known, the hash that most name."""
        node = self._node
        records = await node.discovery.find(WEIGHTS_PURPOSE, bytes.fromhex(run))
        named = Counter(record.value.hex() for record in records)
        if not digest and named:
            digest = max(sorted(named), key=lambda value: named[value])
        holders = [record.publisher for record in records if record.value.hex() == digest]
        return digest, [peer for peer in holders if peer != node.peer]
