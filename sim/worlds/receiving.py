"""Dispatches a member's messages to its parts in a world of cores, and handles reopened streams."""

from typing import Any, Protocol

from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from gossip.allreduce import Part
from partition.plan.paxos_messages import AgreementMessage, ChainHead
from partition.plan.plan import HASH_BYTES, Plan
from partition.run.asks import EndRun
from partition.run.dispatch import Dispatch, Early, Role, role_of
from partition.run.member import Member
from partition.run.messages import check_sender
from partition.steps.frames import OpenedFrame
from partition.steps.messages import Open
from sim.worlds.hosting import SimStageHost
from sim.worlds.run_context import Setting
from sim.worlds.run_messages import Noted, Question, Saved
from sim.worlds.streams import Answer
from sim.worlds.trainer import Trainer


class ReceivingPeer(Protocol):
    """The member that receives, as this module uses it."""

    setting: Setting
    outcome: str
    trainer: Trainer | None
    hosting: SimStageHost
    core: Member

    @property
    def now(self) -> float: ...
    @property
    def plan(self) -> Plan | None: ...
    def ask(self, peer: PeerId, question: Question, seconds: float, done: Answer) -> None: ...


def receive(member: ReceivingPeer, dispatch: Dispatch[Any, Any], sender: PeerId, message: Any) -> None:
    """Dispatch a message. `dispatch` has the plan in force and the messages that came early."""
    try:
        if isinstance(message, AgreementMessage):
            _about_plans(member, sender, message)
            return
        name = plan_named(message)
        if dispatch.find(sender, name) is not None:
            _hand_over(member, sender, message)
        elif isinstance(message, Early):
            dispatch.keep(sender, name, message)
    except RemoteProtocolError:
        member.setting.counters["refused"] += 1


def _about_plans(member: ReceivingPeer, sender: PeerId, message: AgreementMessage) -> None:
    if member.outcome == "done" and isinstance(message, ChainHead) and message.asks:
        # A member that was away when the run ended well still follows its old plan, and asks which plan came
        # next.
        end = EndRun(message.plan, "done", "")
        member.ask(sender, end, member.setting.settings.end_seconds_max, _nothing)
    else:
        member.core.receive(member.now, sender, message)


def _hand_over(member: ReceivingPeer, sender: PeerId, message: Any) -> None:
    plan, trainer, core, hosted = member.plan, member.trainer, member.core, member.hosting.hosted
    assert plan is not None, "a plan is followed"
    match message:
        case Noted():
            check_sender(plan, sender, message)
            core.heard(member.now)
            core.show_step(message.step - 1)
            return
        case Saved():
            core.checkpoints.saved(sender, message.step, message.stage, None)
            return
    match role_of(message):
        case Role.MEMBER:
            core.receive(member.now, sender, message)
        case Role.COMMITTER if trainer is not None:
            trainer.receive(sender, message)
        case Role.STAGE:
            if isinstance(message, Open) and trainer is not None:
                trainer.opened(sender, message)
            if hosted is not None:
                hosted.receive(sender, message)


def reconnected(member: ReceivingPeer, peer: PeerId) -> None:
    """Repeat the messages that may have been lost before a stream was reopened."""
    if member.plan is not None and peer in member.plan.roster:
        member.core.catch_up([peer])
    if member.hosting.hosted is not None:
        member.hosting.hosted.reconnected(peer)
    if member.trainer is not None:
        member.trainer.reconnected(peer)


def plan_named(message: Any) -> bytes:
    """Return the hash of a message's plan."""
    if isinstance(message, Part):
        return message.key[:HASH_BYTES]
    plan: bytes = message.header.plan if isinstance(message, OpenedFrame) else message.plan
    return plan


def _nothing(reply: Any) -> None:
    """Ignore a reply."""
