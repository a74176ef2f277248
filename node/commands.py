"""Handles the commands of clients on this machine, which reach the node over the control channel."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import trio

from crypto.identity import PeerId, parse_peer, peer_text
from node import state as views
from node import state_documents
from node.averaging.service import Averaging
from node.checkpoints.weights import HASHED_BYTES, WEIGHTS_PURPOSE, fetch_weights, weights_name
from node.content import datasets as datasets
from node.content.directory import Directory
from node.content.kept_folders import put_kept_folder
from node.content.reading import kept_reading, reading_document
from node.control import CommandHandler, Emit
from node.documents import offer_document
from node.errors import PeerloomError, RunFailed, Unreachable, UsageError
from node.events import Event, RunChanged, RunEnded
from node.history import EventHistory
from node.placement.inbound import Inbound
from node.placement.leases import PlacementFailed
from node.placement.provider import Provider
from node.protocols.manifest import Run, run_text
from node.protocols.revision import check_changes
from node.requests import (
    REVISABLE,
    DhtFindRequest,
    DhtGetRequest,
    DhtPutRequest,
    DhtStatRequest,
    EventsRequest,
    FetchRequest,
    InviteRequest,
    NamedRun,
    Nothing,
    Prepared,
    ReviseRequest,
    RevokeRequest,
    SetRequest,
    TraceRequest,
    TrainRequest,
    command,
)
from node.run_requests import make_signed_run, run_file_of
from node.runs.metrics import metric_rows
from node.runs.runs import Runs
from node.runs.traces import STEPS_ASKED_MAX, trace_document
from node.seams import Seams, Storage
from node.services.discovery import Discovery
from node.services.energy import EnergyLog
from node.services.measurements import Measurements
from node.services.membership import Membership
from node.services.swarm_clock import skew_text
from node.storage.drafts import draft_beside
from node.text import open_ports_text
from partition.run.states import OVER

RUN_PURPOSE = "run"
RUN_TEXT_LENGTH = 16


class LocalNode(Protocol):
    """The part of `node.runtime.Node` that commands use."""

    peer: PeerId
    seams: Seams
    measurements: Measurements
    membership: Membership
    averaging: Averaging
    provider: Provider
    discovery: Discovery
    runs: Runs
    stopping: trio.Event
    handed_over: trio.Event
    signer: Any
    energy: EnergyLog
    inbound: Inbound

    @property
    def state(self) -> views.State: ...
    @property
    def history(self) -> EventHistory: ...
    @property
    def dht(self) -> Directory: ...
    @property
    def counters(self) -> dict[str, int]: ...
    def watch(self) -> Any: ...
    def set(self, name: str, text: str) -> None: ...


ALONE_TEXT = "no other node gets through to this one, so it trains alone"
WAIT_SECONDS_MAX = 7 * 24 * 3600.0
"""Longest time that a run waits for missing peers; after a week its requester has forgotten it."""


def _of_run(names: Mapping[str, str], run: Mapping[str, Any]) -> dict[str, str]:
    """Return the names of the peers that occur in a run's document."""
    stages = (run.get("plan") or {}).get("stages", ())
    peers = {run["requester"], *(peer for stage in stages for peer in stage["replicas"])}
    peers |= {row[key] for row in run["receipts"] for key in ("provider", "measurer", "requester")}
    return {peer: names[peer] for peer in sorted(peers) if peer in names}


class Commands:
    """The handlers, by command name."""

    def __init__(self, node: LocalNode) -> None:
        self._node = node
        self._chosen: dict[bytes, str] = {}

    @property
    def handlers(self) -> Mapping[str, CommandHandler]:
        """Handlers for `node.control.ControlServer`."""
        return {
            "status": command(Nothing, self._status),
            "peers": command(Nothing, self._peers),
            "measurements": command(Nothing, self._measurements),
            "events": command(EventsRequest, self._events),
            "leave": command(Nothing, self._leave),
            "receipts": command(Nothing, self._receipts),
            "train": command(TrainRequest, self._train),
            "config.set": command(SetRequest, self._set),
            "runs.show": command(NamedRun, self._show),
            "runs.revise": command(ReviseRequest, self._revise),
            "runs.metrics": command(NamedRun, self._metrics),
            "runs.fetch": command(FetchRequest, self._fetch),
            "runs.stop": command(NamedRun, self._stop),
            "runs.drop": command(NamedRun, self._drop),
            "runs.trace": command(TraceRequest, self._trace),
            "runs.invite": command(InviteRequest, self._invite),
            "runs.revoke": command(RevokeRequest, self._revoke),
            "dht.get": command(DhtGetRequest, self._dht_get),
            "dht.put": command(DhtPutRequest, self._dht_put),
            "dht.find": command(DhtFindRequest, self._dht_find),
            "dht.stat": command(DhtStatRequest, self._dht_stat),
        }

    async def _status(self, _request: Nothing, _emit: Emit) -> object:
        node, runs = self._node, self._node.runs
        document = state_documents.status_document(node.state, node.seams.clock.wall(), node.counters)
        document |= {"place": runs.places.own_document(), "spare_process": runs.readiness.document}
        return document | {"contribution": runs.receipts.summary()}

    async def _peers(self, _request: Nothing, _emit: Emit) -> object:
        document = state_documents.peers_document(self._node.state, self._node.seams.clock.wall())
        told = self._node.runs.places.told_of(self._node.runs.receipts.told_of(document))
        return self._node.inbound.told_of(told)

    async def _measurements(self, _request: Nothing, _emit: Emit) -> object:
        return await self._node.measurements.document(self._node.membership.live)

    async def _leave(self, _request: Nothing, _emit: Emit) -> object:
        """Stop the node; report for each of its runs whether its part was handed over."""
        self._node.stopping.set()
        await self._node.handed_over.wait()
        rows = self._node.runs.left.items()
        return {"runs": [{"run": run, "handed_over": is_handed_over} for run, is_handed_over in rows]}

    async def _events(self, request: EventsRequest, emit: Emit) -> object:
        """Emit events since a time (Unix seconds); with `follow`, also later ones until the client leaves."""
        since, kinds = request.since, request.kinds
        text = request.text.lower()

        async def tell(event: Event) -> None:
            if kinds and type(event).__name__ not in kinds:
                return
            document = state_documents.event_document(event)
            if text in json.dumps(document).lower():
                await emit(document)

        with self._node.watch() as events:
            if isinstance(since, int | float):
                for _, event in self._node.history.since(since):
                    await tell(event)
            if request.follow:
                async for event in events:
                    await tell(event)
        return {"forgotten": self._node.history.dropped}

    async def _train(self, request: TrainRequest, emit: Emit) -> object:
        node = self._node
        seconds = min(max(0.0, request.wait_seconds), WAIT_SECONDS_MAX)
        run = await self.make_run(request)
        if not request.follow:
            if seconds:
                node.runs.start_task(self._submit_watched, run, seconds, of=run)
                return {"run": run.text, "status": "placing"}
            await self.submit(run, 0.0)
            return {"run": run.text, "status": "running"}
        with node.watch() as events:
            # A separate task, because a client that hangs up must only stop watching, not stop the placing.
            node.runs.start_task(self._submit_watched, run, seconds, of=run)
            async for event in events:
                if getattr(event, "run", None) != run.text:
                    continue
                await emit(state_documents.event_document(event))
                if isinstance(event, RunEnded):
                    return state_documents.run_document(node.state.runs[run.text])
        raise PeerloomError("the node is stopping")

    async def _publish_run(self, run: Run) -> None:
        """Put the manifest into the DHT, so that it is still available after this node has forgotten it."""
        await self._node.discovery.publish(RUN_PURPOSE, run.id, run.fact.body)

    async def _submit_watched(self, run: Run, wait_seconds: float) -> None:
        with suppress(RunFailed):  # the RunEnded event reports the failure to the watcher
            await self.submit(run, wait_seconds)

    async def make_run(self, prepared: Prepared) -> Run:
        """Sign a run that the command `train` or a program has prepared, and publish it in the DHT. Raises
        UsageError."""
        run_file = run_file_of(prepared)
        run, chosen = await make_signed_run(self._node, run_file, prepared)
        if chosen:
            self._chosen[run.id] = chosen
        plan, goal = run_file.plan, run_file.goal
        self._node.runs.revising.ask_for(run, plan.priority, plan.deadline_minutes, goal)
        self._node.runs.start_task(self._publish_run, run, of=None)
        return run

    async def submit(self, run: Run, wait_seconds: float) -> None:
        """Place a run and start it. Raises RunFailed if it could not be placed within `wait_seconds`."""
        node = self._node
        if chosen := self._chosen.pop(run.id, ""):
            # A new task runs when placing first waits; by then the run is known.
            node.runs.start_task(self._tell_choice, run, chosen, of=None)
        is_alone = node.provider.is_unreachable
        if is_alone:
            node.runs.start_task(self._tell_choice, run, ALONE_TEXT, of=None)
        try:
            await node.runs.submit(run, wait_seconds=wait_seconds)
        except PlacementFailed as error:
            what = f"run {run.text[:8]} was not placed: {error}"
            if skewed := skew_text(node.seams.clock, node.seams.swarm_clock):
                what += f"; {skewed}"
            if not is_alone:
                raise RunFailed(what) from None
            ports = sorted({address.port for address in node.seams.network.addresses})
            raise RunFailed(f"{what}; {ALONE_TEXT}", open_ports_text(ports)) from None

    async def _tell_choice(self, run: Run, chosen: str) -> None:
        """Report, once the run is known, how the choices that its requester left open were made."""
        at = self._node.seams.clock.wall()
        self._node.runs.publish(RunChanged(at=at, run=run.text, state="placing", reason=chosen))
        await trio.lowlevel.checkpoint()

    async def _dht_get(self, request: DhtGetRequest, _emit: Emit) -> object:
        dht, key = self._node.dht, request.key
        if request.immutable:
            value = await dht.get_immutable(key)
        else:
            value = await dht.get(key, request.publisher, request.subkey)
        return {"key": key, "found": value is not None, "value": (value or b"").hex()}

    async def _dht_put(self, request: DhtPutRequest, _emit: Emit) -> object:
        dht, seconds = self._node.dht, request.ttl_seconds
        try:
            value = bytes.fromhex(request.value)
        except ValueError:
            raise UsageError("value: want the bytes to keep, in hexadecimal") from None
        if request.immutable:
            stored = await dht.put_immutable(value, seconds)
        else:
            stored = await dht.put(request.key, value, seconds, request.subkey)
        return {"key": stored.key, "holders": stored.holders, "wanted": stored.wanted}

    async def _dht_find(self, request: DhtFindRequest, _emit: Emit) -> object:
        found = await self._node.dht.find(
            request.device,
            request.memory_bytes,
            request.near,
            int(request.count),
            flops_per_second=request.flops_per_second,
        )
        return {"nodes": [asdict(node) for node in found]}

    async def _dht_stat(self, request: DhtStatRequest, _emit: Emit) -> object:
        return await self._node.dht.stat(request.key)

    async def _set(self, request: SetRequest, _emit: Emit) -> object:
        """Change one rule by which this node serves others. The change lasts until the node stops."""
        name, value = request.name, request.value
        self._node.set(name, value)
        state = self._node.state
        small = list(state.capacity.small) if state.capacity is not None else []
        return {"name": name, "value": value, "offer": offer_document(state.offer), "small": small}

    async def _show(self, request: NamedRun, _emit: Emit) -> object:
        """Describe a run as this node knows it, or else as the run's members report it."""
        run = find_run(self._node.state.runs, request.run)
        found = self._node.runs.receipts.document(run)
        state = self._node.state
        names = state_documents.peer_names(state)
        document = await self.show(run) | {"receipts": [*found["issued"], *found["earned"]]}
        reading = reading_document(await kept_reading(self._node.seams, run))
        return document | {"names": _of_run(names, document), "reading": reading}

    async def _receipts(self, _request: Nothing, _emit: Emit) -> object:
        return self._node.runs.receipts.document()

    async def show(self, run: str) -> dict[str, Any]:
        """Describe a run as this node knows it, or else as its members report it. Raises RunFailed."""
        view = self._node.state.runs.get(run)
        if view is not None:
            return state_documents.run_document(view) | {"is_followed": True}
        told = await self._node.runs.revising.ask(run)
        return {
            "run": run,
            "is_followed": False,
            "model": told.model,
            "data": told.data,
            "requester": peer_text(PeerId(told.requester)),
            "status": told.status,
            "detail": told.detail,
            "step": told.step,
            "steps": told.steps,
            "loss": told.loss,
            "accuracy": told.accuracy,
            "weights": told.weights,
            "result": "elsewhere" if told.weights else "",
        }

    async def _metrics(self, request: NamedRun, _emit: Emit) -> object:
        run = find_run(self._node.state.runs, request.run)
        view = self._node.state.runs.get(run)
        if view is None:
            raise RunFailed(
                f"run {run[:8]} was not active here, so it has no metrics here", "look: `peerloom runs`"
            )
        events = (event for _, event in self._node.history.after(0))
        return {"run": run, "rows": metric_rows(view, events, self._node.energy.joules)}

    async def _revise(self, request: ReviseRequest, _emit: Emit) -> object:
        run = self._going(request.run)
        if (is_paused := request.is_paused) is not None:
            return await self._node.runs.revising.revise(run, {"is_paused": is_paused})
        asked = {name: getattr(request, name) for name in REVISABLE}
        return await self.revise(run, **asked)

    async def revise(self, run: str, **asked: Any) -> dict[str, Any]:
        """Change fields of `RevisionBody` in one of this node's own runs; None leaves a field unchanged.

        Raises UsageError, RunFailed.
        """
        changes = {name: value for name, value in asked.items() if value is not None}
        if not changes:
            raise UsageError("nothing to change: give a learning rate, steps, a priority or a goal")
        try:
            check_changes(changes)
        except ValueError as error:
            raise UsageError(f"revise: {error}") from None
        return await self._node.runs.revising.revise(run, changes)

    async def _fetch(self, request: FetchRequest, _emit: Emit) -> object:
        return await self.fetch(request.run, request.out, request.folder)

    async def fetch(self, name: str, file: str, folder: str = "") -> dict[str, Any]:
        """Write the weights of a run to a file, from this node's disk or from any peer that keeps them. Write
        what is kept of the Hugging Face folder that the run trained to `folder`.

        Raises RunFailed if it has not ended or nobody delivers it, UsageError if a file cannot be written.
        """
        node, out = self._node, Path(file)
        run = find_run(node.state.runs, name)
        view = node.state.runs.get(run)
        if view is not None and view.status not in OVER:
            raise RunFailed(f"run {run[:8]} has not ended: step {view.step} of {view.steps}")
        try:
            await put_kept_folder(node.seams, run, folder)
            size = await node.seams.executor.run(partial(_copy_out, node.seams.storage, run, out))
            if size is None:
                digest, holders = await self._holders(run, view.weights if view is not None else "")
                size = await fetch_weights(node.seams, run, holders, digest, partial(draft_beside, out))
        except Unreachable as error:
            raise _not_fetched(run, "" if view is None else view.status, error) from None
        except OSError as error:
            raise UsageError(f"--out {out}: {(error.strerror or str(error)).lower()}") from None
        return {"run": run, "out": str(out), "size_bytes": size}

    async def _stop(self, request: NamedRun, _emit: Emit) -> object:
        return await self._node.runs.stopping.stop(self._going(request.run))

    async def _drop(self, request: NamedRun, _emit: Emit) -> object:
        return await self._node.runs.stopping.drop(self._going(request.run))

    async def _trace(self, request: TraceRequest, _emit: Emit) -> object:
        """Return the spans of a run's newest steps from all of its members, on this node's clock."""
        node, steps = self._node, int(min(request.steps, STEPS_ASKED_MAX))
        run = find_run(node.state.runs, request.run)
        plan = node.state.runs[run].plan if run in node.state.runs else None
        if plan is None:
            raise RunFailed(f"run {run[:8]} has no stages to trace: it has no plan, or is in local mode")
        last = max(0, node.state.runs[run].step - 1)
        known = [*(member.run.id for member in node.runs.members.values()), *node.runs.spans.runs]
        name = next((name for name in known if run_text(name) == run), None)
        if name is None:
            raise RunFailed(f"run {run[:8]}: its plan is from before this node started; spans are not kept")
        peers = [*node.runs.spans.holders(name, node.membership.live)]
        rows = await node.runs.traces.collect(name, peers, max(0, last - steps + 1), last)
        names = {peer: member.name for peer, member in node.state.members.items()}
        if node.state.started is not None:
            names[node.peer] = node.state.started.name
        return trace_document(name, rows, names)

    async def _invite(self, request: InviteRequest, _emit: Emit) -> object:
        run, hours = request.run, request.hours
        peer, admit = request.peer, request.admit
        return {"run": run, "invitation": self.invite(run, peer, hours, admit)}

    def invite(self, run: str, peer: str, hours: float, admit: str) -> str:
        """Return an invitation to an averaging run. Raises UsageError."""
        if not run:
            raise UsageError("invite: the run has no name")
        return self._node.averaging.invitations.invite(run, self._peer(peer), hours * 3600, admit)

    async def _revoke(self, request: RevokeRequest, _emit: Emit) -> object:
        run, peer = request.run, request.peer
        return {"run": run, "peer": peer_text(self._peer(peer)), "told": await self.revoke(run, peer)}

    async def revoke(self, run: str, peer: str) -> int:
        """Revoke a peer's tickets for a run: a local-mode run by its id, or an averaging run by its name.
        Return how many members received the revocation. Raises UsageError."""
        node, subject = self._node, self._peer(peer)
        ids = [member.run.text for member in node.runs.local.members.values()]
        if run and any(each.startswith(run) for each in ids) and not node.averaging.invitations.knows(run):
            return await node.runs.local.revoke(find_run(ids, run), subject)
        return await node.averaging.invitations.revoke(run, subject)

    def _peer(self, text: str) -> PeerId:
        """Return the peer with this id, or the one member with this name. Raises UsageError."""
        named = [peer for peer, member in self._node.state.members.items() if member.name == text]
        if len(named) == 1:
            return named[0]
        try:
            return parse_peer(text)
        except ValueError as error:
            many = f"{len(named)} members have the name {text!r}; give the id" if named else str(error)
            raise UsageError(f"peer: {many}", "ids: `peerloom peers`") from None

    def _going(self, run: str) -> str:
        known = {*self._node.state.runs, *self._node.runs.stopping.known()}
        return find_run(sorted(known), run)

    async def _holders(self, run: str, digest: str) -> tuple[str, list[PeerId]]:
        """Return the weights' hash and the peers that claim in the DHT to keep them. If `digest` is empty,
        use the hash that most records name."""
        node = self._node
        records = await node.discovery.find(WEIGHTS_PURPOSE, bytes.fromhex(run))
        named = Counter(record.value.hex() for record in records)
        if not digest and named:
            digest = max(sorted(named), key=lambda value: named[value])
        holders = [record.publisher for record in records if record.value.hex() == digest]
        return digest, [peer for peer in holders if peer != node.peer]


def _not_fetched(run: str, status: str, error: Unreachable) -> RunFailed:
    if status not in ("stopped", "failed"):
        return RunFailed(f"no peer delivers the weights of run {run[:8]}: {error.detail}")
    word = "was stopped" if status == "stopped" else "failed"
    return RunFailed(
        f"run {run[:8]} {word}, so it has no result",
        f"if it saved a checkpoint: `peerloom checkpoint export {run[:8]} --out FILE`",
    )


def _copy_out(storage: Storage, run: str, out: Path) -> int | None:
    """Copy a run's weights from this node's disk; return their length, or None if they are not here."""
    file = storage.open(weights_name(run))
    if file is None:
        return None
    with file:
        draft = draft_beside(out)
        try:
            while data := file.read(HASHED_BYTES):
                draft.write(data)
            draft.commit()
        finally:
            draft.discard()
        return file.tell()


def find_run(known: Iterable[str], prefix: str) -> str:
    """Return the one known run with this prefix, or `prefix` if it is a whole id. Raises UsageError."""
    found = [run for run in known if run.startswith(prefix)] if prefix else []
    if len(found) == 1:
        return found[0]
    if len(found) > 1:
        raise UsageError(f"run {prefix}: {len(found)} runs have this prefix; give more of the id")
    if len(prefix) == RUN_TEXT_LENGTH and all(letter in "0123456789abcdef" for letter in prefix):
        return prefix
    raise UsageError(f"run '{prefix[:40]}' is not known here", "look: `peerloom runs`, or give the whole id")
