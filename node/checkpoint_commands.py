"""Handles the checkpoint commands of this machine's clients, which arrive over the control channel."""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

import trio

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId, peer_text
from node.checkpoints.replication import CheckpointReplicator
from node.checkpoints.service import Checkpoints
from node.checkpoints.store import document
from node.commands import LocalNode, find_run
from node.control import CommandHandler, Emit
from node.errors import RunFailed, Unreachable, UsageError
from node.requests import AuditRequest, ExportRequest, FetchCheckpointRequest, NamedRun, Nothing, command

COUNTED_RUNS_MAX = 64
"""Maximum number of runs whose copies are counted for one list of checkpoints."""


class CheckpointCommands:
    """The handlers of the checkpoint commands, by command name. `save` makes a run's committer save a
    checkpoint at its next step, and returns that step; it raises PeerloomError if the run is not active."""

    def __init__(
        self,
        node: LocalNode,
        checkpoints: Checkpoints,
        copies: CheckpointReplicator,
        save: Callable[[str], Awaitable[int]],
    ) -> None:
        self._node = node
        self._checkpoints = checkpoints
        self._copies = copies
        self._save_run = save

    @property
    def handlers(self) -> Mapping[str, CommandHandler]:
        """Handlers for `node.control.ControlServer`, in addition to those of `Commands`."""
        return {
            "runs.audit": command(AuditRequest, self._audit),
            "checkpoint.list": command(Nothing, self._list),
            "checkpoint.save": command(NamedRun, self._save),
            "checkpoint.export": command(ExportRequest, self._export),
            "checkpoint.fetch": command(FetchCheckpointRequest, self._fetch),
        }

    async def _audit(self, request: AuditRequest, _emit: Emit) -> object:
        """Recompute frames of a committed step of a run, from the checkpoint before that step."""
        run = find_run(self._node.state.runs, request.run)
        step = request.step if request.step is not None and request.step >= 0 else None
        return await self._node.runs.audits.audit(run, step)

    async def _list(self, _request: Nothing, _emit: Emit) -> object:
        found = await self._checkpoints.call(self._checkpoints.store.all)
        named: Counter[bytes] = Counter()

        async def count(run: str) -> None:
            offers = await self._copies.holders(run)
            named.update(offer.checkpoint for peer, offer in offers.items() if peer != self._node.peer)

        async with trio.open_nursery() as nursery:
            for run in list(dict.fromkeys(kept.run for kept in found))[-COUNTED_RUNS_MAX:]:
                nursery.start_soon(count, run)
        return {"checkpoints": [document(kept, named[kept.name] + 1) for kept in found]}

    async def _save(self, request: NamedRun, _emit: Emit) -> object:
        run = await self._find(request.run)
        return {"run": run, "step": await self._save_run(run)}

    async def _export(self, request: ExportRequest, _emit: Emit) -> object:
        run, step = await self._find(request.run), request.step
        out = Path(request.out)
        kept = await self._checkpoints.call(partial(self._checkpoints.store.find, run, step))
        if kept is None:
            raise checkpoint_not_found(run, step)
        try:
            holders = [] if kept.is_whole else await self._holders(run)
            requester = PeerId(kept.checkpoint.manifest.author)
            graph = await self._node.runs.models.get(kept.checkpoint.graph, [requester, *holders])
            size = await self._checkpoints.export(kept, graph, out, holders)
        except (Unreachable, RemoteProtocolError) as error:
            raise RunFailed(f"the checkpoint of run {run[:8]} cannot be exported: {error}") from None
        except OSError as error:
            raise UsageError(f"--out {out}: {(error.strerror or str(error)).lower()}") from None
        return {"run": run, "step": kept.checkpoint.step, "out": str(out), "size_bytes": size}

    async def _fetch(self, request: FetchCheckpointRequest, _emit: Emit) -> object:
        run, step = await self._find(request.run), request.step
        holders = [self._peer(text) for text in request.holders]
        try:
            kept = await self._copies.fetch(run, step, holders or await self._holders(run))
        except Unreachable as error:
            raise RunFailed(f"no checkpoint of run {run[:8]} could be fetched: {error.detail}") from None
        except OSError as error:
            raise RunFailed(f"the checkpoint could not be kept: {error.strerror or error}") from None
        return document(kept, None)

    async def _find(self, run: str) -> str:
        here = await self._checkpoints.call(self._checkpoints.store.all)
        known = {*self._node.state.runs, *(kept.run for kept in here)}
        return find_run(sorted(known), run)

    async def _holders(self, run: str) -> list[PeerId]:
        return [peer for peer in await self._copies.holders(run) if peer != self._node.peer]

    def _peer(self, text: str) -> PeerId:
        """Return the member with this name, id or end of an id. Raises UsageError."""
        members = self._node.state.members
        found = [
            peer
            for peer, member in members.items()
            if text and (member.name == text or peer_text(peer).endswith(text.removeprefix("...")))
        ]
        if len(found) == 1:
            return found[0]
        if len(found) > 1:
            raise UsageError(f"--from {text}: {len(found)} members match; give more of the id")
        raise UsageError(f"--from {text}: no member has that name or id", "look: `peerloom peers`")


def checkpoint_not_found(run: str, step: int | None) -> RunFailed:
    """Return the error for a checkpoint that this node does not have."""
    which = f"checkpoint of step {step}" if step is not None else "checkpoint"
    return RunFailed(
        f"no {which} of run {run[:8]} is here",
        "look: `peerloom checkpoint list`          or: `peerloom checkpoint fetch RUN`",
    )
