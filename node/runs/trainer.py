"""A trainer under one plan: this node feeds its share of the samples and, as the first trainer, commits.

Each plan has a new trainer object. Only for `node.runs.member`.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress

import trio

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.errors import PeerloomError, Unreachable
from node.pipeline.committer import CommitterShell
from node.pipeline.feeder import FeederShell
from node.protocols.manifest import Run
from node.runs.context import RunService
from node.runs.manifest_builder import fits, make_batches
from partition.plan.assignment import lanes_of
from partition.plan.plan import Plan
from partition.steps.messages import Open

SAMPLES_SHOWN_MAX = 16
"""Maximum number of samples that a reason names."""


class TrainingLoop:
    """A trainer under one plan; `committer` is set if this node is the first trainer."""

    def __init__(
        self,
        service: RunService,
        run: Run,
        plan: Plan,
        holders: Sequence[PeerId],
        committer: CommitterShell | None,
        *,
        cannot: Callable[[str], None],
        over: Callable[[str | None], None],
    ) -> None:
        """Prepare a trainer. `holders` may provide the model and the data. `cannot` is called with the reason
        if this node cannot feed, and `over` when committing has ended, with the failure or None."""
        self.committer = committer
        self._service = service
        self._run = run
        self._plan = plan
        self._holders = holders
        self._cannot = cannot
        self._over = over
        self._feeder: FeederShell | None = None
        self._early: Open | None = None
        self._scope = trio.CancelScope()

    async def run(self) -> None:
        """Train until the steps are done, or until `stop`."""
        with self._scope:
            try:
                feeder = await self._make_feeder()
            except (PeerloomError, Unreachable) as error:
                self._cannot(error.detail if isinstance(error, Unreachable) else str(error))
                return
            self._feeder = feeder
            if self.committer is not None:
                self.committer.made = feeder.made
            if self._early is not None:
                try:
                    self.open(self._plan.committer, self._early)
                except RemoteProtocolError as error:
                    self._service.refuse(self._plan.committer, error)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._feed, feeder)
                if self.committer is not None:
                    self._over(_with_samples(await self.committer.run(), self.committer, feeder))
                    nursery.cancel_scope.cancel()

    async def _feed(self, feeder: FeederShell) -> None:
        try:
            await feeder.run()
        except Unreachable as error:
            self._cannot(error.detail)

    def stop(self) -> None:
        """Stop, because a new plan is in force or the run has ended."""
        self._scope.cancel()

    async def _make_feeder(self) -> FeederShell:
        service, manifest = self._service, self._run.manifest
        graph = await service.models.get(manifest.graph_hash, self._holders)
        lanes = lanes_of(self._plan.trainers, service.signer.peer)
        dataset = await service.load_data(self._run, self._holders, lanes)
        if not fits(dataset, manifest, graph):
            raise PeerloomError("the data this node has does not fit the run's manifest; has it changed?")
        batches = make_batches(dataset, manifest, graph)
        make = service.seams.part(FeederShell)
        return make(service.signer, self._run, self._plan, batches, service.seams, service.send)

    def open(self, sender: PeerId, message: Open) -> None:
        """Feed micro-batches that the committer has opened. Raises RemoteProtocolError."""
        if self._feeder is not None:
            self._feeder.receive(self._service.seams.clock.monotonic(), sender, message)
        elif sender == self._plan.committer:
            # the data is still being fetched; the newest message includes the earlier ones
            self._early = message

    def reconnected(self, peer: PeerId) -> None:
        """Handle a new link to `peer` in place of a broken one."""
        if self.committer is not None:
            self.committer.reconnected(peer)
        if self._feeder is not None:
            self._feeder.reconnected(peer)


async def keep_data(service: RunService, run: Run, holders: Sequence[PeerId]) -> None:
    """Fetch the run's data before it is needed, because its present holders may be gone by then."""
    with suppress(Unreachable, PeerloomError):
        await service.load_data(run, holders)


def _with_samples(reason: str | None, committer: CommitterShell, feeder: FeederShell) -> str | None:
    """Return why a run failed, with the samples that may be the cause."""
    if reason is None or committer.refused is None:
        return reason
    number, is_training = committer.refused
    rows = feeder.batches.rows(number, train=is_training)
    shown = ", ".join(map(str, rows[:SAMPLES_SHOWN_MAX]))
    more = ", ..." if len(rows) > SAMPLES_SHOWN_MAX else ""
    return f"{reason} (samples {shown}{more} {'to train on' if is_training else 'held out'})"
