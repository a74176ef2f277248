"""A member's answers to requests in a world of cores. Its cores decide about plans and slots; its disk
answers here."""

from typing import Protocol

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.plan import Plan, plan_hash
from partition.run.asks import (
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
    StartRun,
)
from partition.run.completion import answer_end
from partition.run.member import Member
from partition.run.provider import OVER, KnownRun, StageProvider
from sim.worlds.hosting import SimStageHost
from sim.worlds.keeping import SimCheckpointKeeper
from sim.worlds.run_messages import FetchCopy, FetchState, Question
from sim.worlds.streams import Answer


class Answering(Protocol):
    """The member that is asked, as `answer` uses it."""

    me: PeerId
    outcome: str
    provider: StageProvider
    requester: PeerId
    keeping: SimCheckpointKeeper
    hosting: SimStageHost
    core: Member

    @property
    def now(self) -> float: ...
    @property
    def plan(self) -> Plan | None: ...
    def begin(self, plan: Plan) -> None: ...
    def end(self, outcome: str, reason: str) -> None: ...


def answer(member: Answering, asker: PeerId, question: Question, reply: Answer) -> None:
    """Answer a request now or later; never, if `asker` must not wait for an answer."""
    match question:
        case FetchCopy():
            reply(member.keeping.copy(question.step, question.unit))
        case KeepStage():
            member.keeping.keep(question, reply)
        case NameCheckpoint():
            reply(member.keeping.name(question))
        case HoldStage():
            reply(_lease(member, asker, question))
        case OpenStage():
            _prepare(member, asker, question.plan, reply)
        case StartRun():
            reply(_start(member, asker, question.plan))
        case _ if member.outcome:
            reply(Declined(OVER))
        case ReleaseStage():
            name = plan_hash(question.plan)
            member.provider.on_release(asker, name)
            member.hosting.unprepare(name)
            reply(Done())
        case RenewRun():
            reply(member.core.on_renew(member.now, asker, plan_hash(question.plan)))
        case EndRun():
            _end(member, asker, question, reply)
        case _:
            _answer_of_plan(member, question, reply)


def _known(member: Answering) -> KnownRun:
    return KnownRun(member.requester, bool(member.outcome), member.core)


def _lease(member: Answering, asker: PeerId, question: HoldStage) -> Done | Declined:
    provider, now = member.provider, member.now
    for name in provider.supersede(asker, question.plan, _known(member)):
        member.hosting.unprepare(name)
    hold = provider.on_hold(now, asker, question.plan, question.stage, _known(member), lambda: None)
    if isinstance(hold, Declined):
        return hold
    promise = provider.promise(now, hold)
    if isinstance(promise, Declined):
        return promise
    if promise.stage is not None:
        provider.slots.promise(now, promise)
    return Done()


def _prepare(member: Answering, asker: PeerId, plan: Plan, reply: Answer) -> None:
    answered = member.provider.on_open(member.now, asker, plan, _known(member))
    if answered is not None:
        reply(answered)
    else:
        member.hosting.prepare(plan, asker, lambda reason: reply(Declined(reason) if reason else Done()))


def _start(member: Answering, asker: PeerId, plan: Plan) -> Done | Declined:
    answered = member.provider.on_start(member.now, asker, plan, _known(member))
    if answered is None:
        member.begin(plan)
    return answered or Done()


def _end(member: Answering, asker: PeerId, question: EndRun, reply: Answer) -> None:
    declined: Declined | None
    try:
        declined = answer_end(member.plan, asker, question.plan)
    except RemoteProtocolError as error:  # no committee known here contains a member that was admitted later
        declined = Declined(str(error))
    if declined is None:
        member.end(question.outcome, question.detail)
    reply(declined or Done())


def _answer_of_plan(member: Answering, question: FetchState | HandOverStage, reply: Answer) -> None:
    """Answer a request that only members under the same plan make."""
    plan, hosted = member.plan, member.hosting.hosted
    asked = question.plan if isinstance(question, FetchState) else plan_hash(question.plan)
    if plan is None or asked != plan_hash(plan):
        reply(Declined("there is no such plan here"))
    elif isinstance(question, FetchState):
        state = None if hosted is None else hosted.state(question.step)
        reply(state or Declined("the state is that of a different step"))
    else:
        reply(Declined("no stage is open here") if hosted is None else hosted.stage.state)
