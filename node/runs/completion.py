"""The result of a run: the stages' parameters are joined and stored, and each member fetches the result."""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

import trio

from crypto.identity import PeerId
from node.checkpoints.weights import (
    FETCH_SECONDS_MAX,
    digest_of,
    export_bytes_max,
    fetch_stage,
    fetch_weights,
    has_result,
    join_stages,
    keep,
    result_bytes,
    weights_name,
)
from node.errors import StageFailed, Unreachable
from node.protocols.manifest import Run
from node.runs.context import RunService
from node.storage.blobs import NoRoom
from partition.plan.plan import Plan
from partition.run.asks import Declined, Done, HandOverStage, Reply
from partition.run.messages import REASON_LENGTH_MAX
from partition.run.run_end import RunEnd

BUSY_SECONDS = 1.0
"""Seconds before a busy source of the result is asked again; a source serves a few members at a time."""


class CollectedStages:
    """The stages that were handed over for a run's result. `export` returns the stage that this node
    holds."""

    def __init__(self, service: RunService, run: Run, export: Callable[[], Awaitable[bytes]]) -> None:
        self._service = service
        self._run = run
        self._export = export
        self._plan: Plan | None = None
        self._parts: dict[int, bytes] = {}

    async def bring(self, peer: PeerId, wanted: HandOverStage, seconds: float) -> Reply:
        """Fetch a peer's stage. Raises Unreachable."""
        service, plan = self._service, wanted.plan
        if plan != self._plan:
            self._plan, self._parts = plan, {}
        parts = self._parts
        if peer == service.signer.peer:
            try:
                parts[wanted.stage] = await self._export()
            except StageFailed as error:  # another replica may be able to hand it over
                return Declined(str(error)[:REASON_LENGTH_MAX])
            return Done()
        graph = await service.models.get(self._run.manifest.graph_hash, plan.members)
        parts[wanted.stage] = await fetch_stage(
            plan, peer, service.seams.network, seconds=seconds, bytes_max=export_bytes_max(graph)
        )
        return Done()

    async def keep(self, plan: Plan, end: RunEnd, detail: str) -> None:
        """Join the stages of this plan, store the result, and report to the `end` of the run's member.
        `detail` is a note for people on how the run ended."""
        service, run, clock = self._service, self._run, self._service.seams.clock
        work, parts = service.seams.executor.run, [self._parts[stage] for stage in sorted(self._parts)]
        try:
            graph = await service.models.get(run.manifest.graph_hash, plan.members)
            data = await work(partial(join_stages, run, graph, parts))
            await _admit(service, run, len(data))
            weights = await work(partial(keep, service.seams.storage, run.text, data))
        except Unreachable as error:
            end.result_spoilt(clock.monotonic(), plan, error.detail)
        except NoRoom as error:
            end.result_lost(clock.monotonic(), plan, f"the weights could not be stored: {error}")
        except OSError as error:
            reason = f"the weights could not be stored: {error.strerror or error}"
            end.result_lost(clock.monotonic(), plan, reason)
        else:
            end.result_kept(clock.monotonic(), plan, weights, detail)
            self._parts.clear()


async def fetch_result(service: RunService, run: Run, source: PeerId, weights: str) -> str:
    """Fetch and store the result that `source` has. Return "" once it is here, else the reason for people.

    The model limits its length. Results of other peers' runs count against the guests' disk budget.
    """
    seams = service.seams
    storage, work = seams.storage, seams.executor.run
    until = seams.clock.monotonic() + FETCH_SECONDS_MAX
    if await work(partial(has_result, storage, run.text)):
        is_it = await work(partial(digest_of, storage, run.text)) == weights
        return "" if is_it else "a different result of this run is already here, and stays"
    is_here = False
    try:
        graph = await service.models.get(run.manifest.graph_hash, [source, run.requester])
        size = await work(partial(result_bytes, run, graph))
        await _admit(service, run, size)
        draft = partial(storage.draft, weights_name(run.text))
        while True:
            try:
                await fetch_weights(seams, run.text, [source], weights, draft, size)
                is_here = True
                return ""
            except Unreachable as error:
                # All members ask at the same time, and a source serves only a few at once.
                if error.reason != "busy" or seams.clock.monotonic() >= until:
                    raise
            await trio.sleep(BUSY_SECONDS)
    except Unreachable as error:
        return f"the weights are not here: {error.detail}"
    except NoRoom as error:
        return f"the weights are not here: {error}"
    except OSError as error:
        return f"the weights could not be stored: {error.strerror or error}"
    finally:
        if not is_here:
            with trio.CancelScope(shield=True), suppress(OSError):
                await work(partial(service.guests.release, run.text))


async def _admit(service: RunService, run: Run, size: int) -> None:
    """Make room for a result of this size, if it is another peer's. Raises NoRoom or OSError."""
    if run.requester != service.signer.peer:
        admit = partial(service.guests.admit, run.text, [weights_name(run.text)], size)
        await service.seams.executor.run(admit)
