"""What the questions of others come to at a member of a run in a world of cores. As `node.runs.serving`."""

from typing import TYPE_CHECKING, Any

from crypto.identity import PeerId
from node.runs.pulse import SILENCE_SECONDS_MAX
from partition.plan.plan import Plan, committee, plan_hash
from sim.worlds.said import (
    DONE,
    Declined,
    End,
    ExportStage,
    FetchCopy,
    FetchState,
    KeepCopy,
    Prepare,
    Question,
    Release,
    Renew,
    Start,
)
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
        case Prepare():
            _prepare(member, asker, question.plan, reply)
        case Release():
            member.hosting.unprepare(question.plan)
            reply(DONE)
        case Start():
            member.started(asker, question.plan, reply)
        case _:
            _answer_of_plan(member, asker, question, reply)


def _prepare(member: "Member", asker: PeerId, plan: Plan, reply: Answer) -> None:
    if member.plan is not None and plan_hash(member.plan) != plan.parent:
        member.catch_up([asker])
        reply(Declined("it does not know yet how the run went on"))
    elif plan.stage_of(member.me) is None:
        reply(DONE)
    elif member.is_busy:
        reply(Declined("busy"))
    else:
        name = plan_hash(plan)
        member.hosting.prepare(plan, lambda is_open: reply(DONE if is_open else Declined("busy")))
        # Whoever asked for a stage may die before its plan is decided.
        member.later(SILENCE_SECONDS_MAX, lambda: _expire(member, name))


def _expire(member: "Member", plan: bytes) -> None:
    member.hosting.unprepare(plan)


def _answer_of_plan(member: "Member", asker: PeerId, question: Any, reply: Answer) -> None:
    """What is of use only to whoever follows the same plan."""
    plan, hosted = member.plan, member.hosting.hosted
    if plan is None:
        reply(Declined("no such run here"))
    elif isinstance(question, Renew) and question.plan != plan_hash(plan):
        reply(DONE)  # there is another plan: the chain tells
    elif question.plan != plan_hash(plan):
        reply(Declined("no such plan here"))
    elif isinstance(question, Renew):
        member.heard()
        reply(DONE)
    elif isinstance(question, End) and asker not in (plan.committer, *committee(plan)):
        reply(Declined("it has no vote in the run"))
    elif isinstance(question, End):
        member.end(question.outcome, question.reason)
        reply(DONE)
    elif isinstance(question, FetchState):
        state = None if hosted is None else hosted.state(question.step)
        reply(state or Declined("the state is that of another step"))
    elif isinstance(question, ExportStage):
        reply(Declined("no stage is open here") if hosted is None else hosted.stage.state)
