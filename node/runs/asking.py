"""Sends the requests of a run's core: each `Ask` becomes one request, and its answer one `Reply`."""

from collections.abc import Callable

from crypto.errors import RemoteProtocolError
from crypto.facts import Fact
from node.checkpoints.replication import Conclude, Keep
from node.errors import Unreachable
from node.placement.leases import lease
from node.protocols import runs as wire
from node.protocols.checkpoint import StageState
from node.protocols.manifest import Run
from node.runs.chain import ChainShell
from node.runs.completion import CollectedStages
from node.runs.context import RunService
from partition.plan.plan import encode_plan, plan_hash
from partition.run.asks import (
    Ask,
    Asks,
    Declined,
    Done,
    EndRun,
    HandOverStage,
    HoldStage,
    KeepStage,
    NameCheckpoint,
    OpenStage,
    ReleaseStage,
    RenewRun,
    Reply,
    StartRun,
    Unanswered,
)


class AskShell:
    """Sends the requests of one member of a run. `chain` provides the history of plans for newcomers, and
    `collected` receives the stages that are handed over."""

    def __init__(
        self,
        service: RunService,
        run: Run,
        chain: ChainShell,
        revision: Callable[[], Fact | None],
        collected: CollectedStages,
    ) -> None:
        self._service = service
        self._run = run
        self._chain = chain
        self._revision = revision
        self._collected = collected

    def put(self, asks: Asks, replied: Callable[[float, int, Reply], None]) -> None:
        """Send all new requests concurrently. `replied` is called with the time, the request's number and its
        answer."""
        for ask in asks.take():
            self._service.start_task(self._put, ask, replied, of=self._run)

    async def _put(self, ask: Ask, replied: Callable[[float, int, Reply], None]) -> None:
        try:
            reply = await self._answer(ask)
        except Unreachable as error:
            reply = Unanswered(f"{error.reason}: {error.detail}")
        except RemoteProtocolError as error:  # the plan's history is too long to be sent
            reply = Declined(str(error))
        replied(self._service.seams.clock.monotonic(), ask.number, reply)

    async def _answer(self, ask: Ask) -> Reply:
        service, run, wanted = self._service, self._run, ask.request
        request: wire.Request
        match wanted:
            case HandOverStage():
                return await self._collected.bring(ask.peer, wanted, ask.seconds)
            case KeepStage():
                return await self._answer_copy(ask, _keep(run, wanted))
            case NameCheckpoint():
                return await self._answer_copy(ask, Conclude(run.id, wanted.step, wanted.name))
            case HoldStage():
                history = self._chain.history(wanted.plan, wanted.change)
                data, said = encode_plan(wanted.plan), self._revision()
                request = wire.LeaseRequest(run.fact, data, wanted.stage, history, said)
                refusal = await lease(
                    ask.peer, request, wanted.plan, service.signer, service.ask, service.settings
                )
                return Done() if refusal is None else Declined(refusal.reason)
            case OpenStage():
                history = self._chain.history(wanted.plan, wanted.change)
                request = wire.PrepareStage(run.fact, encode_plan(wanted.plan), history)
            case StartRun():
                request = wire.Start(run.fact, encode_plan(wanted.plan), self._chain.history(wanted.plan))
            case RenewRun():
                request = wire.Renew(run.id, plan_hash(wanted.plan))
            case EndRun():
                request = wire.End(wanted.plan, wanted.outcome, wanted.detail, wanted.weights)
            case ReleaseStage():
                request = wire.Release(run.id, plan_hash(wanted.plan))
        return _reply(await service.ask(ask.peer, request, ask.seconds))

    async def _answer_copy(self, ask: Ask, request: Keep | Conclude) -> Reply:
        return _reply(await self._service.copies.put(ask.peer, request, ask.seconds))


def _keep(run: Run, wanted: KeepStage) -> Keep:
    assert isinstance(wanted.state, StageState), "a replica of this run sent a different type of state"
    return Keep(run.id, wanted.step, wanted.stage, wanted.state, (wanted.saver,))


def _reply(reply: object) -> Reply:
    return reply if isinstance(reply, Done | Declined) else Declined("not what was asked for")
