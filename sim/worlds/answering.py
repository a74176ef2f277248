"""What the questions of others come to at a member of a run in a world of cores: its core decides on plans,
its slot and its disk are here."""

from collections.abc import Callable
from typing import Protocol

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from partition.plan.plan import Plan, plan_hash
from partition.run.asks import Declined, Done, EndRun, HoldStage, OpenStage, ReleaseStage, RenewRun, StartRun
from partition.run.member import Member
from partition.run.slots import Promise, Slots
from partition.run.timeouts import SILENCE_SECONDS_MAX
from sim.worlds.hosting import Hosting
from sim.worlds.keeping import Keeping
from sim.worlds.run_messages import ExportStage, FetchCopy, FetchState, KeepCopy, Question
from sim.worlds.streams import Answer


class Answering(Protocol):
    """The member that is asked."""

    me: PeerId
    outcome: str
    slots: Slots
    keeping: Keeping
    hosting: Hosting
    core: Member

    @property
    def now(self) -> float: ...
    @property
    def plan(self) -> Plan | None: ...
    @property
    def is_busy(self) -> bool: ...
    def begin(self, plan: Plan) -> None: ...
    def end(self, outcome: str, reason: str) -> None: ...
    def later(self, seconds: float, action: Callable[[], None]) -> None: ...


def answer(member: Answering, asker: PeerId, question: Question, reply: Answer) -> None:
    """Answer now or later, or not at all where `asker` is not to wait."""
    match question:
        case FetchCopy():
            reply(member.keeping.copy(question.step, question.stage))
        case KeepCopy():
            member.keeping.keep(question, reply)
        case _ if member.outcome:
            reply(Declined("the run is over"))
        case HoldStage():
            _lease(member, asker, question, reply)
        case OpenStage():
            _prepare(member, asker, question.plan, reply)
        case ReleaseStage():
            name = plan_hash(question.plan)
            member.slots.release(name, asker)
            member.hosting.unprepare(name)
            reply(Done())
        case StartRun():
            _start(member, asker, question.plan, reply)
        case RenewRun():
            reply(member.core.on_renew(member.now, asker, plan_hash(question.plan)))
        case EndRun():
            _end(member, asker, question, reply)
        case _:
            _answer_of_plan(member, question, reply)


def _lease(member: Answering, asker: PeerId, question: HoldStage, reply: Answer) -> None:
    is_witness = question.stage is None
    if not is_witness:
        for given_back in member.slots.supersede(question.plan.run, asker, question.plan.height):
            member.hosting.unprepare(given_back.plan)
    if member.is_busy and not is_witness:
        reply(Declined("busy"))
    elif member.core.is_behind(asker, question.plan):
        reply(Declined("it does not know yet how the run went on"))
    else:
        if not is_witness:
            plan, until = question.plan, member.now + SILENCE_SECONDS_MAX
            promise = Promise(plan.run, plan_hash(plan), question.stage, asker, until, plan.height)
            member.slots.promise(member.now, promise)
        reply(Done())


def _prepare(member: Answering, asker: PeerId, plan: Plan, reply: Answer) -> None:
    name = plan_hash(plan)
    if member.core.is_behind(asker, plan):
        reply(Declined("it does not know yet how the run went on"))
    elif plan.stage_of(member.me) is None:
        reply(Done())
    elif not _holds(member, plan):
        reply(Declined("no lease for this stage"))
    else:
        member.hosting.prepare(plan, asker, lambda is_open: reply(Done() if is_open else Declined("busy")))
        # The planner that asked for a stage may die before its plan is decided.
        member.later(SILENCE_SECONDS_MAX, lambda: _expire(member, name))


def _holds(member: Answering, plan: Plan) -> bool:
    """Return whether the slot is promised to the stage that this plan gives to the member."""
    stage = plan.stage_of(member.me)
    return stage is not None and member.slots.holds(member.now, plan.run, plan_hash(plan), stage)


def _start(member: Answering, asker: PeerId, plan: Plan, reply: Answer) -> None:
    answered = member.core.on_start(asker, plan)
    if answered is not None:
        reply(answered)
    elif plan.stage_of(member.me) is not None and not _holds(member, plan):
        reply(Declined("no lease for this stage"))
    else:
        member.begin(plan)
        reply(Done())


def _expire(member: Answering, plan: bytes) -> None:
    member.hosting.unprepare(plan)


def _end(member: Answering, asker: PeerId, question: EndRun, reply: Answer) -> None:
    declined: Declined | None
    try:
        declined = member.core.on_end(asker, question.plan)
    except RemoteProtocolError as error:  # whoever was admitted later is in no committee that is known here
        declined = Declined(str(error))
    if declined is None:
        member.end(question.outcome, question.detail)
    reply(declined or Done())


def _answer_of_plan(member: Answering, question: FetchState | ExportStage, reply: Answer) -> None:
    """What is of use only to whoever follows the same plan."""
    plan, hosted = member.plan, member.hosting.hosted
    if plan is None or question.plan != plan_hash(plan):
        reply(Declined("no such plan here"))
    elif isinstance(question, FetchState):
        state = None if hosted is None else hosted.state(question.step)
        reply(state or Declined("the state is that of another step"))
    else:
        reply(Declined("no stage is open here") if hosted is None else hosted.stage.state)
