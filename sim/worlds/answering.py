"""What the questions of others come to at a member of a run in a world of cores. As `node.runs.serving`."""

from typing import TYPE_CHECKING, Any

from crypto.identity import PeerId
from partition.plan.plan import Plan, committee, plan_hash
from partition.run.asks import Declined, Done, HoldStage, OpenStage, ReleaseStage, RenewRun, StartRun
from partition.run.timeouts import SILENCE_SECONDS_MAX
from sim.worlds.said import End, ExportStage, FetchCopy, FetchState, KeepCopy, Question
from sim.worlds.streams import Answer

if TYPE_CHECKING:
    from sim.worlds.members import Member


def answer(member: "Member", asker: PeerId, question: Question, reply: Answer) -> None:
    """Answer now or later, or not at all where `asker` is not to wait."""
    match question:
        case FetchCopy():
            reply(member.keeping.copy(question.step, question.stage))
        case KeepCopy():
            member.keeping.keep(question, reply)
        case _ if member.outcome:
            reply(Declined("the run is over"))
        case HoldStage():
            _lease(member, asker, question.plan, reply)
        case OpenStage():
            _prepare(member, asker, question.plan, reply)
        case ReleaseStage():
            name = plan_hash(question.plan)
            member.slots.release(member.me, name)
            member.hosting.unprepare(name)
            reply(Done())
        case StartRun():
            _start(member, asker, question.plan, reply)
        case _:
            _answer_of_plan(member, asker, question, reply)


def _lease(member: "Member", asker: PeerId, plan: Plan, reply: Answer) -> None:
    if member.is_busy:
        reply(Declined("busy"))
    elif _is_behind(member, asker, plan):
        reply(Declined("it does not know yet how the run went on"))
    else:
        member.slots.promise(member.me, plan_hash(plan), asker)
        reply(Done())


def _is_behind(member: "Member", asker: PeerId, plan: Plan) -> bool:
    if member.plan is None or plan_hash(member.plan) == plan.parent:
        return False
    member.catch_up([asker])
    return True


def _prepare(member: "Member", asker: PeerId, plan: Plan, reply: Answer) -> None:
    name = plan_hash(plan)
    if _is_behind(member, asker, plan):
        reply(Declined("it does not know yet how the run went on"))
    elif plan.stage_of(member.me) is None:
        reply(Done())
    elif not member.slots.holds(member.me, name):
        reply(Declined("no lease for this stage"))
    else:
        member.hosting.prepare(plan, lambda is_open: reply(Done() if is_open else Declined("busy")))
        # Whoever asked for a stage may die before its plan is decided.
        member.later(SILENCE_SECONDS_MAX, lambda: _expire(member, name))


def _start(member: "Member", asker: PeerId, plan: Plan, reply: Answer) -> None:
    """`plan` is in force, says `asker`."""
    if member.plan is None:
        if plan.stage_of(member.me) is not None and not member.slots.holds(member.me, plan_hash(plan)):
            reply(Declined("no lease for this stage"))
            return
        member.begin(plan)
        reply(Done())
        return
    # What comes after is decided by the chain, and heard from it.
    if member.plan.height < plan.height and asker in member.plan.roster:
        member.catch_up([asker])
    is_other = member.plan.height == plan.height and member.plan != plan
    reply(Declined("another plan is in force") if is_other else Done())


def _expire(member: "Member", plan: bytes) -> None:
    member.hosting.unprepare(plan)


def _answer_of_plan(member: "Member", asker: PeerId, question: Any, reply: Answer) -> None:
    """What is of use only to whoever follows the same plan."""
    plan, hosted = member.plan, member.hosting.hosted
    if plan is None:
        reply(Declined("no such run here"))
    elif isinstance(question, RenewRun):
        if question.plan == plan:
            member.heard()
        reply(Done())  # where there is another plan, the chain tells
    elif question.plan != plan_hash(plan):
        reply(Declined("no such plan here"))
    elif isinstance(question, End) and asker not in (plan.committer, *committee(plan)):
        reply(Declined("it has no vote in the run"))
    elif isinstance(question, End):
        member.end(question.outcome, question.reason)
        reply(Done())
    elif isinstance(question, FetchState):
        state = None if hosted is None else hosted.state(question.step)
        reply(state or Declined("the state is that of another step"))
    elif isinstance(question, ExportStage):
        reply(Declined("no stage is open here") if hosted is None else hosted.stage.state)
