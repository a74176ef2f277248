"""Events as lines, on a node's screen and under `train --follow`.

It works on event documents (`node.state_documents.event_document`), because a client receives only these over
the control channel. From earlier events it keeps only what later lines need. `node.cli.run_lines` makes the
lines of runs.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from node.cli.event_text import Event, at_clock, name_and_id
from node.cli.render import (
    bytes_text,
    compute_lines,
    labelled,
    seconds_text,
    short_address,
    short_id,
)
from node.cli.run_lines import FIRST_STEPS, STEPS_APART, RunLines
from node.invocation import command_span, elsewhere, program_from_anywhere, shown
from node.paths import is_default_data_dir, short_path
from node.text import CLOCK_REMEDY, admit_text, clock_text, counted

LIES = {
    "averaging-commitment": "two versions of what it sends",
    "averaging-have": "two lists of what it received",
    "averaging-seal": "two results of the same round",
}
FOUND = {"beacon": "heard on the local network", "memory": "met before"}


class EventScreen:
    """Turns a sequence of events into lines. `seeds` is the number of addresses to join through. `names` are
    names of peers that are not in any event."""

    def __init__(
        self,
        *,
        seeds: int = 0,
        environ: Mapping[str, str] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self._seeds = seeds
        self._environ = environ or {}
        self._names = dict(names or {})
        self._runs = RunLines(self._names)
        self._outcomes: dict[str, str] = {}
        self._capacity: Event | None = None
        self._fences: list[str] = []
        self._has_started = False
        self._offer = ""
        self._reachable: bool | None = None

    def lines(self, event: Event) -> list[str]:
        """Return the lines for one event; an empty list for kinds that are not shown."""
        render = _RENDERERS.get(event["kind"])
        return render(self, event) if render is not None else self._runs.lines(event)

    def _name(self, peer: str) -> str:
        return self._names.get(peer) or short_id(peer)

    def _started(self, event: Event) -> list[str]:
        self._has_started = True
        self._names[event["peer"]] = event["name"]
        identity = "new identity, kept in" if event["identity_is_new"] else "identity from"
        lines = [f"{event['name']}  {short_id(event['peer'])}   {identity} {short_path(event['data_dir'])}"]
        wanted = {str(port): before for before, port in event["moved"]}
        if event["port_wanted"] not in (0, event["port"]):
            wanted.setdefault(str(event["port"]), event["port_wanted"])
        for address in map(short_address, event["addresses"]):
            port = address.rpartition(":")[2]
            note = f"   (port {wanted[port]} was taken)" if port in wanted else ""
            lines.append(labelled("listening", address + note))
        if event["is_open"]:
            who = "members of the swarm" if event["is_private"] else "anybody"
            lines.append(labelled("", f"open to the network: {who} may connect"))
            lines.append(labelled("", "(for this machine alone: --listen 127.0.0.1:9747)"))
        if self._capacity is not None:
            lines += compute_lines(self._capacity)
        lines += self._fences
        joining = (
            f"joining through {counted(self._seeds, 'address', 'addresses')}"
            if self._seeds
            else "no --join given"
        )
        kind = ", private" if event["is_private"] else ""
        swarm = f"{event['swarm']}{kind}; {joining}"
        lines.append(labelled("swarm", swarm))
        if not event["join_address"]:
            lines.append(f"  On another machine:  {event['join_hint']}")
        else:
            join = f"--join {short_address(event['join_address'])}"
            if event["swarm"] != "default":
                join += f" --swarm {event['swarm']}"
            # On the other machine the copied key file may have any name.
            key = "PEERLOOM_KEY_FILE=FILE " if event["is_private"] else ""
            lines.append(f"  On another machine:  {key}{elsewhere()} {join}")
        if not is_default_data_dir(Path(event["data_dir"]), self._environ):
            # Absolute, for a second terminal that may be in a different folder.
            status = command_span("status", "--data-dir", os.path.abspath(event["data_dir"]))
            lines.append(f"  On this machine:     {shown(status, program_from_anywhere)}")
        return lines

    def _alert(self, event: Event) -> list[str]:
        return [at_clock(event, f"alert: {event['text']}")]

    def _page(self, event: Event) -> list[str]:
        port = event["address"].rpartition(":")[2]
        wanted = event["port_wanted"]
        note = f"   (port {wanted} was taken)" if wanted not in (0, int(port)) else ""
        models = event.get("models") or event["address"]
        told = [labelled("models at", f"{models}/v1")] if models != event["address"] else []
        return [labelled("page", (event.get("link") or event["address"]) + note), *told]

    def _measured(self, event: Event) -> list[str]:
        before, self._capacity = self._capacity, event
        if not self._has_started or (before is not None and compute_lines(before) == compute_lines(event)):
            return []
        if before is None:
            return compute_lines(event)
        now, *rest = compute_lines(event)
        return [at_clock(event, f"measured again: {now.split(maxsplit=1)[1]}"), *rest]

    def _fences_tried(self, event: Event) -> list[str]:
        # Complete fences are the normal case, which is not shown.
        self._fences = []
        if event["unfenced"]:
            taken = "takes stages of others anyway" if event["is_allowed"] else "takes no stages of others"
            missing = "; ".join(event["unfenced"])
            self._fences = [labelled("fences", f"incomplete, {taken}: {missing}   (`peerloom doctor`)")]
        return self._fences if self._has_started else []

    def _join_tried(self, event: Event) -> list[str]:
        # A node keeps trying, so an outcome is shown only if it has changed.
        if self._outcomes.get(event["address"]) == event["outcome"]:
            return []
        self._outcomes[event["address"]] = event["outcome"]
        detail = event["detail"]
        if event["outcome"] == "ok" and event["peer"] is not None:
            detail = f"{name_and_id(self._names, event['peer'])}  {seconds_text(event['seconds'])}"
        if (how := FOUND.get(event.get("found_by", ""))) is not None:
            detail += f"  ({how})"
        return [f"join  {event['outcome']:<10} {short_address(event['address'])}   {detail}"]

    def _reachability(self, event: Event) -> list[str]:
        # Only changes are shown, and being reachable is the normal case.
        before, self._reachable = self._reachable, event["reachable"]
        if event["reachable"] is False and before is not False:
            told = (
                f"{counted(event['asked'], 'other')} could not reach this node: it takes none of their stages"
            )
            return [at_clock(event, f"{told}; `peerloom doctor`")]
        if event["reachable"] and before is False:
            return [at_clock(event, "others can reach this node now")]
        return []

    def _clock(self, event: Event) -> list[str]:
        if not event["seconds"]:
            return [at_clock(event, "this machine's clock agrees with its peers' again")]
        text = clock_text(event["seconds"], event["peers"])
        return [at_clock(event, f"{text}: {CLOCK_REMEDY}")]

    def _datagrams(self, event: Event) -> list[str]:
        if not event["peers"]:
            return [at_clock(event, "datagrams get through to all peers again")]
        count, of = len(event["peers"]), event["of"]
        text = (
            f"datagrams do not get through to {count} of {counted(of, 'peer')}: streams "
            "are used; `peerloom doctor`"
        )
        return [at_clock(event, text)]

    def _identity_shared(self, event: Event) -> list[str]:
        where = " or ".join(map(short_address, event["addresses"])) or "an unknown place"
        goes = "it" if event["is_younger"] else "this one"
        text = f"another node has this node's identity, at {where}: {goes} began later, and stops"
        return [at_clock(event, text)]

    def _joined(self, event: Event) -> list[str]:
        self._names[event["peer"]] = event["name"]
        found = event["found_through"]
        through = f" (found through {found})" if found not in ("", "itself") else ""
        return [at_clock(event, f"{event['name']} {short_id(event['peer'])} joined{through}")]

    def _degraded(self, event: Event) -> list[str]:
        name, condition = self._name(event["peer"]), event["condition"]
        if not condition:
            return [at_clock(event, f"{name} answers in time again")]
        return [at_clock(event, f"{name} is degraded, {condition}: {event['reason']}")]

    def _suspected(self, event: Event) -> list[str]:
        return [at_clock(event, f"{self._name(event['peer'])} suspected by {self._name(event['by'])}")]

    def _refuted(self, event: Event) -> list[str]:
        return [at_clock(event, f"{self._name(event['peer'])} is alive after all")]

    def _lost(self, event: Event) -> list[str]:
        return [at_clock(event, f"{self._name(event['peer'])} lost ({event['reason']})")]

    def _left(self, event: Event) -> list[str]:
        return [at_clock(event, f"{self._name(event['peer'])} left")]

    def _peer_averages(self, event: Event) -> list[str]:
        with_us = counted(event["peers"], "other peer")
        return [
            at_clock(event, f"averaging {event['run']}: {self._name(event['peer'])} takes part, {with_us}")
        ]

    def _peer_stopped(self, event: Event) -> list[str]:
        rest = f"{event['reason']}; {counted(event['peers'], 'other peer')}"
        return [at_clock(event, f"averaging {event['run']}: {self._name(event['peer'])} is out ({rest})")]

    def _liar_proved(self, event: Event) -> list[str]:
        said = LIES[event["said"]]
        return [
            at_clock(
                event,
                f"averaging {event['run']}: {self._name(event['peer'])} is excluded: it signed {said}",
            )
        ]

    def _averaged(self, event: Event) -> list[str]:
        line = f"averaging {event['run']}  step {event['step']}  "
        if event["outcome"] != "ok":
            return [at_clock(event, f"{line}nothing averaged: {event['reason']}")]
        moved = bytes_text(event["sent_bytes"] + event["received_bytes"])
        whose = f"{len(event['averaged'])} of {counted(event['members'], 'peer')}"
        line += f"ok {seconds_text(event['seconds'])}  {whose}  {moved}"
        if event.get("liars_max"):
            line += f"  {event['aggregate']}, tolerates {event['liars_max']} of them lying"
        else:
            line += f"  {event.get('aggregate', 'mean')}"
        return [
            at_clock(event, line + (f"  rounding {event['rounding']:.1e}" if event.get("rounding") else ""))
        ]

    def _averaging_opened(self, event: Event) -> list[str]:
        who = admit_text(event["admit"], is_private=event["is_private"])
        return [at_clock(event, f"averaging {event['run']}: {who}; by {event['aggregate']}")]

    def _stepped(self, event: Event) -> list[str]:
        step = event["step"]
        if step > FIRST_STEPS and step % STEPS_APART:
            return []
        rate = event["samples"] / event["seconds"] if event["seconds"] > 0 else 0.0
        with_us = counted(event["peers"], "other peer")
        samples = counted(event["samples"], "sample")
        line = f"averaging {event['run']}  step {step:>5}  {samples}  {rate:.0f} samples/s"
        return [f"{line}  {with_us}"]

    def _offer_changed(self, event: Event) -> list[str]:
        said = "serves others" if event["may_serve"] else f"does not serve others now: {event['reason']}"
        before, self._offer = self._offer, said
        lines = [at_clock(event, said)] if said != before else []
        if event["sends_less"]:
            lines.append(at_clock(event, f"sends less now: {event['sends_less']}"))
        if event["unread"]:
            rules = ", ".join(event["unread"])
            lines.append(
                at_clock(event, f"this machine cannot measure these rules, so does not apply them: {rules}")
            )
        return lines

    def _configured(self, event: Event) -> list[str]:
        if not event["version"]:
            return []
        said = ", ".join(event["settings"]) or "none kept to"
        whose = event["name"] or short_id(event["key"])
        lines = [at_clock(event, f"settings of {whose}, version {event['version']}: {said}")]
        if event["skipped"]:
            lines.append(at_clock(event, f"settings that were skipped: {', '.join(event['skipped'])}"))
        return lines

    def _caught_up(self, event: Event) -> list[str]:
        took = f"{bytes_text(event['size_bytes'])} in {seconds_text(event['seconds'])}"
        return [at_clock(event, f"averaging {event['run']}: caught up with step {event['step']}, {took}")]

    def _refused(self, event: Event) -> list[str]:
        return [at_clock(event, f"refused {counted(event['count'], 'time')} so far: {event['reason']}")]

    def _short(self, event: Event) -> list[str]:
        holders = counted(event["holders"], "node")
        return [
            at_clock(
                event, f"record '{event['purpose']}' is kept by {holders} of {event['wanted']} wanted nodes"
            )
        ]

    def _stopped(self, event: Event) -> list[str]:
        return [at_clock(event, "said goodbye")]


def _service(_screen: EventScreen, event: Event) -> list[str]:
    name, stage = event["name"], event["stage"] + 1
    if not event["is_held"]:
        return [at_clock(event, f"service {name}: stage {stage} is no longer held here: {event['detail']}")]
    ready = ", ".join(map(str, event["ready"]))
    return [
        at_clock(
            event, f"service {name}: stage {stage} is here; {ready} of {event['wished']} answer by stage"
        )
    ]


def _answer_moved(screen: EventScreen, event: Event) -> list[str]:
    route = " -> ".join(map(screen._name, event["route"]))
    note = "" if event.get("is_exact", True) else " (text may differ)"
    return [at_clock(event, f"answer of {event['name']} continues over {route}{note}: {event['reason']}")]


def _answer_ended(_screen: EventScreen, event: Event) -> list[str]:
    text = f"answer of {event['name']}: {event['outcome']}, {counted(event['tokens'], 'token')}"
    if event["first_seconds"] is not None:
        text += f", the first after {event['first_seconds']:.2f} s"
    if event["tokens_per_second"] is not None:
        text += f", {event['tokens_per_second']:.1f} a second"
    return [at_clock(event, text + (f": {event['detail']}" if event["detail"] else ""))]


_RENDERERS = {
    "NodeStarted": EventScreen._started,
    "PageOpened": EventScreen._page,
    "AlertRaised": EventScreen._alert,
    "ServiceChanged": _service,
    "GenerationMoved": _answer_moved,
    "GenerationEnded": _answer_ended,
    "CapacityMeasured": EventScreen._measured,
    "FencesTried": EventScreen._fences_tried,
    "JoinTried": EventScreen._join_tried,
    "ReachabilityFound": EventScreen._reachability,
    "ClockCompared": EventScreen._clock,
    "DatagramsBlocked": EventScreen._datagrams,
    "IdentityShared": EventScreen._identity_shared,
    "MemberJoined": EventScreen._joined,
    "MemberDegraded": EventScreen._degraded,
    "MemberSuspected": EventScreen._suspected,
    "MemberRefuted": EventScreen._refuted,
    "MemberLost": EventScreen._lost,
    "MemberLeft": EventScreen._left,
    "OfferChanged": EventScreen._offer_changed,
    "NodeConfigured": EventScreen._configured,
    "AveragingOpened": EventScreen._averaging_opened,
    "AveragingJoined": EventScreen._peer_averages,
    "AveragingLeft": EventScreen._peer_stopped,
    "LiarProved": EventScreen._liar_proved,
    "AveragingEnded": EventScreen._averaged,
    "AveragingStepped": EventScreen._stepped,
    "StateFetched": EventScreen._caught_up,
    "StrangerRefused": EventScreen._refused,
    "RecordShort": EventScreen._short,
    "NodeStopped": EventScreen._stopped,
}
