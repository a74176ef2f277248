"""The result of a run: the stages' parameters joined, kept, and fetched by each member."""

from contextlib import suppress
from functools import partial

import trio

from crypto.identity import PeerId
from node.checkpoints.weights import (
    FETCH_SECONDS_MAX,
    collect,
    digest_of,
    fetch_weights,
    has_result,
    keep,
    result_bytes,
    weights_name,
)
from node.errors import StageFailed, Unreachable
from node.pipeline.replica import ReplicaShell
from node.protocols.manifest import Run
from node.runs.context import RunService
from node.storage.blobs import NoRoom
from partition.plan.plan import Plan
from partition.run.completion import COLLECT_SECONDS_MAX
from partition.run.messages import REASON_LENGTH_MAX

BUSY_SECONDS = 1.0
"""Before a source of the result that is busy is asked again: it serves a few members at a time."""
REASON_SHOWN_MAX = REASON_LENGTH_MAX - 110
"""The length of a failure's reason that is shown: the note on the newest checkpoint must fit behind it."""


async def collect_result(
    service: RunService, run: Run, plan: Plan, replica: ReplicaShell | None
) -> tuple[str, str | None]:
    """Join and store the stages' parameters; return their hash, and the reason of a failure, if any.

    `replica` is the stage that this node holds itself, if it does.
    """
    seams, me = service.seams, service.signer.peer
    own = None
    if replica is not None:
        with suppress(StageFailed):  # another replica of its stage may hand them over
            own = await replica.export()
    until = seams.clock.monotonic() + COLLECT_SECONDS_MAX
    while True:
        try:
            graph = await service.models.get(run.manifest.graph_hash, plan.members)
            data = await collect(run, graph, plan, tuple(service.live()), me, own, seams)
            await _admit(service, run, len(data))
            return await seams.executor.run(partial(keep, seams.storage, run.text, data)), None
        except Unreachable as error:
            reason = error.detail
        except NoRoom as error:
            return "", f"the weights could not be kept: {error}"
        except OSError as error:
            return "", f"the weights could not be kept: {error.strerror or error}"
        if seams.clock.monotonic() >= until:
            return "", reason
        # If a new plan was the reason, it comes here meanwhile, and all this begins again under it.
        await trio.sleep(service.settings.retry_seconds)


def with_checkpoint(reason: str, run: Run, kept: tuple[bytes, int] | None) -> str:
    """Return why a run failed, with how to recover its newest checkpoint and the step of that."""
    if kept is None:
        return reason
    look = f"`peerloom checkpoint export {run.text[:8]} --out FILE`"
    return f"{reason[:REASON_SHOWN_MAX]}; the checkpoint of step {kept[1]} is kept: {look}"


async def fetch_result(service: RunService, run: Run, source: PeerId, weights: str) -> str:
    """Fetch and store the result that `source` has; return why not, in words for a person, or "" once it is
    here.

    Its length is limited by the model; results of others' runs count against the guests' budget.
    """
    seams = service.seams
    storage, work = seams.storage, seams.executor.run
    until = seams.clock.monotonic() + FETCH_SECONDS_MAX
    if await work(partial(has_result, storage, run.text)):
        is_it = await work(partial(digest_of, storage, run.text)) == weights
        return "" if is_it else "another result of this run is here already, and stays"
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
                # All members ask at once, and a source serves a few at a time.
                if error.reason != "busy" or seams.clock.monotonic() >= until:
                    raise
            await trio.sleep(BUSY_SECONDS)
    except Unreachable as error:
        return f"the weights are not here: {error.detail}"
    except NoRoom as error:
        return f"the weights are not here: {error}"
    except OSError as error:
        return f"the weights could not be kept: {error.strerror or error}"
    finally:
        if not is_here:
            with trio.CancelScope(shield=True), suppress(OSError):
                await work(partial(service.guests.release, run.text))


async def _admit(service: RunService, run: Run, size: int) -> None:
    """Make room for a result of this size. Raises NoRoom or OSError."""
    if run.requester != service.signer.peer:
        admit = partial(service.guests.admit, run.text, [weights_name(run.text)], size)
        await service.seams.executor.run(admit)
