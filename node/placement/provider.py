"""This node as a provider: which runs it admits and when, and the capacity of a slot.

It combines the owner's rules (`Config`), the fences of this machine and its present use (`permission`).
`watch` reads the machine's state, and calls back on changes.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import trio

from crypto.identity import PeerId
from node.config import AcceptRuns, Config, read_setting, rule_of
from node.errors import UsageError
from node.events import OfferChanged
from node.offering import SENDS_LESS, Offering
from node.placement.admission import Machine
from node.placement.permission import LOOK_SECONDS, MachinePermission, Permission, Reading
from node.placement.slots import share
from node.seams import Clock, Executor
from node.services.capacity import Capacity
from node.services.metadata import FENCED, OBSERVER, RELAY_WORD, STAGES, UNREACHABLE_WORD
from node.suggest import did_you_mean

CHANGEABLE = {
    "accept_runs": ("resources", "accept_runs"),
    "device": ("resources", "device"),
    "memory": ("resources", "memory"),
    "scratch": ("resources", "scratch"),
    "disk": ("resources", "disk"),
    "cores": ("resources", "cores"),
    "location": ("resources", "location"),
    "slots": ("offer", "slots"),
    "hours": ("offer", "hours"),
    "idle": ("offer", "idle_seconds"),
    "load": ("offer", "load_percent"),
    "upload": ("offer", "upload_bytes_per_second"),
    "download": ("offer", "download_bytes_per_second"),
    "mains_only": ("offer", "mains_only"),
    "battery_min": ("offer", "battery_min_percent"),
    "battery_low": ("offer", "battery_low"),
    "metered": ("offer", "metered"),
    "peers": ("offer", "peers"),
    "runs": ("offer", "runs"),
    "own_data": ("offer", "own_data"),
    "peer_sessions": ("offer", "peer_sessions"),
    "peer_tokens": ("offer", "peer_tokens_per_minute"),
    "peer_cache": ("offer", "peer_cache_percent"),
}
"""Settings that can change while a node runs: the name of the rule, and the setting's location in a
Config."""


class Requested(Protocol):
    """A run or a service: its requester, and its id as people write it."""

    @property
    def requester(self) -> PeerId: ...
    @property
    def text(self) -> str: ...


class Provider:
    """The provider of one node. `unfenced` are the missing fences of a stage's process here. `read` returns
    the machine's state; it is None if the state is not watched."""

    def __init__(self, config: Config, clock: Clock) -> None:
        self.config = self._owned = config
        self.unfenced: tuple[str, ...] = ()
        self.cannot_compute = ""
        """Why no stage can compute on this machine at all, as a text for people; empty if stages can."""
        self.is_unreachable = False
        """Whether no other node can reach this one, directly or by relay, according to nodes that tried."""
        self.is_relay = False
        """Whether this node relays traffic to peers that nobody can dial."""
        self.read: Callable[[], Reading] | None = None
        self.changed: Callable[[Permission], None] = lambda _permission: None
        self._clock = clock
        self._permit = MachinePermission()

    @property
    def rules(self) -> Offering:
        """The owner's rules."""
        return self.config.offer

    @property
    def permission(self) -> Permission:
        """Whether the machine's present use permits serving others, and if not, why."""
        return self._permit.now

    @property
    def takes_stages(self) -> bool:
        """Whether this node computes stages at all, even if only of its own runs."""
        is_wanted = not self.config.observer and self.config.resources.accept_runs != "never"
        return is_wanted and not self.cannot_compute

    def keeps_spare(self) -> bool:
        """Return whether a process may be loaded here before anybody asks for a stage."""
        return self.takes_stages and self.permission.may_serve and self.config.resources.spare_process

    @property
    def takes_stages_of_others(self) -> bool:
        """Whether others may ask for a slot now."""
        is_fenced = not self.unfenced or self.config.resources.allow_unfenced
        return self.takes_stages and is_fenced and self.permission.may_serve and not self.is_unreachable

    @property
    def offered(self) -> Permission:
        """Whether any other node is served now, and if not, why. Unlike `permission`, it includes the owner's
        general rules."""
        if reason := self._refuses_all():
            return replace(self.permission, may_serve=False, reason=reason)
        return self.permission

    @property
    def words(self) -> dict[str, bool]:
        """This node's announced flags, by their words."""
        return {
            STAGES: self.takes_stages,
            FENCED: not self.unfenced,
            OBSERVER: self.config.observer,
            self.permission.word: not self.permission.may_serve,
            UNREACHABLE_WORD: self.is_unreachable,
            RELAY_WORD: self.is_relay,
            SENDS_LESS: bool(self.permission.sends_less),
        }

    def _refuses_all(self) -> str:
        """Return why no other node is served, for reasons other than the machine's use; empty if some may
        be."""
        accepts, rules = self.config.resources.accept_runs, self.rules
        if self.config.observer:
            return "it only watches (observer)"
        if accepts == "never":
            return "accept_runs = never"
        if self.cannot_compute:
            return self.cannot_compute
        if accepts == "listed" and not rules.peers:
            return "accept_runs = listed, and no peers are listed"
        if accepts == "invited" and not rules.runs:
            return "accept_runs = invited, and no runs are invited"
        if self.is_unreachable:
            return "no other node gets through to it"
        if self.unfenced and not self.config.resources.allow_unfenced:
            return "it cannot fence stages in (`peerloom status` says what is missing)"
        return ""

    def offer(self, at: float) -> OfferChanged:
        """Return the present offer as an event for people."""
        found = self.offered
        return OfferChanged(
            at=at,
            may_serve=found.may_serve,
            reason=found.reason,
            unread=found.unread,
            sends_less=found.sends_less,
        )

    def refusal(self, run: Requested, me: PeerId) -> str | None:
        """Return why no stage of this run or service is accepted, as a text for people; None if it is."""
        if not self.takes_stages:
            return "takes no stages"
        if run.requester == me:
            return None
        accepts, rules = self.config.resources.accept_runs, self.rules
        if accepts == "listed" and run.requester not in rules.peers:
            return "takes stages of listed peers only"
        if accepts == "invited" and not any(run.text.startswith(each) for each in rules.runs):
            return "takes stages of invited runs only"
        if self.is_unreachable:
            return "takes no stages of others: no other node gets through to it"
        if not self.permission.may_serve:
            return f"takes no stages of others now: {self.permission.reason}"
        if self.takes_stages_of_others:
            return None
        return f"takes no stages of others, because it cannot fence them in: {'; '.join(self.unfenced)}"

    def machine(self, capacity: Capacity) -> Machine:
        """Return each slot's resources for a stage."""
        whole = Machine(
            capacity.cores,
            capacity.device,
            capacity.memory_free_bytes,
            allow_unfenced=self.config.resources.allow_unfenced,
        )
        return share(whole, self.rules.slots)

    def of_a_slot(self, capacity: Capacity) -> Capacity:
        """Return each slot's share of a machine, as announced and used in plans."""
        slots = self.rules.slots
        return replace(
            capacity,
            cores=max(1, capacity.cores // slots),
            memory_free_bytes=capacity.memory_free_bytes // slots,
            flops_per_second=capacity.flops_per_second / slots,
        )

    def accept(self, accept_runs: AcceptRuns) -> None:
        """Set whose stages are accepted, until this node ends."""
        resources = replace(self.config.resources, accept_runs=accept_runs)
        self.config = replace(self.config, resources=resources)

    def set(self, name: str, text: str | None) -> Any:
        """Change one setting until this node ends; None restores the configured value. Return the value.
        Raises UsageError."""
        place = CHANGEABLE.get(name)
        if place is None:
            raise UsageError(
                f"{name[:40]} cannot be changed while the node runs{did_you_mean(name, sorted(CHANGEABLE))}",
                f"these can: {', '.join(sorted(CHANGEABLE))}",
            )
        rule, (table, key) = rule_of(name), place
        if text is None:
            value = getattr(getattr(self._owned, table), key)
        else:
            items = [item for item in text.replace(",", " ").split() if item] if rule.many else [text]
            read = [read_setting(f"{name}:", item, rule.read) for item in items]
            value = tuple(read) if rule.many else read[0]
        self.config = replace(self.config, **{table: replace(getattr(self.config, table), **{key: value})})
        self._permit.reset()
        if self.read is not None:
            self.look(self.read())
        return value

    def look(self, reading: Reading) -> None:
        """Use a new reading of the machine's state, and announce a change of what others may request."""
        before = self.permission
        found = self._permit.look(self._clock.monotonic(), self.rules, reading)
        if found != before:
            self.changed(found)

    async def watch(self, executor: Executor) -> None:
        """Read the machine's state regularly while there is a rule that depends on it."""
        while True:
            if self.read is not None and self.rules.are_watched:
                self.look(await executor.run(self.read))
            await trio.sleep(LOOK_SECONDS)
