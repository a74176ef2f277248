"""Events as lines: what scrolls by on a node's screen and under `train --follow`.

Works on event documents (`node.state_documents.event_document`), because a client gets just these over the
control channel. It keeps only what a line needs from earlier events: names, and the pace of steps.
"""

import os
import time
from collections import deque
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

from node.cli.render import (
    bytes_text,
    compute_lines,
    data_text,
    labelled,
    seconds_text,
    short_address,
    short_id,
)
from node.invocation import command_span, elsewhere, program_from_anywhere, shown
from node.paths import is_default_data_dir, short_path
from node.text import CLOCK_REMEDY, admit_text, clock_text, counted, cover_text, layers_text

Event = Mapping[str, Any]
LIES = {
    "averaging-commitment": "two versions of what it sends",
    "averaging-have": "two lists of what it got",
    "averaging-seal": "two results of one round",
}
FOUND = {"beacon": "heard on the local network", "memory": "met before"}
FIRST_STEPS = 5
"""Every step is shown up to here, then every STEPS_APART-th: the curve stays readable."""
PACE_STEPS = 20
"""The time left follows the mean of as many steps: one slow step is no forecast."""
STEPS_APART = 10


def rate_text(step: Mapping[str, Any]) -> str:
    """Return how fast a committed step was: in samples, and in tokens where the loss counts those."""
    if step["seconds"] <= 0:
        return "0 samples/s"
    text = f"{step['samples'] / step['seconds']:.0f} samples/s"
    if step.get("counted", 0) > step["samples"]:
        text += f"  {step['counted'] / step['seconds']:.0f} tokens/s"
    return text


class EventScreen:
    """Turns events, in their order, into lines. `seeds` is the number of addresses to join through, `names`
    what peers are called that no event has told of.

    Long because each kind of event has its own few lines.
    """

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
        self._outcomes: dict[str, str] = {}
        self._steps: dict[str, int] = {}
        self._layers_of: dict[str, tuple[tuple[int, ...], ...]] = {}
        self._seconds: dict[str, deque[float]] = {}
        self._counts_tokens: set[str] = set()
        self._capacity: Event | None = None
        self._fences: list[str] = []
        self._has_started = False
        self._offer = ""
        self._reachable: bool | None = None

    def lines(self, event: Event) -> list[str]:
        """The lines for one event; none for kinds that are nobody's news."""
        render = _RENDERERS.get(event["kind"])
        return render(self, event) if render is not None else []

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
            # There the key file, copied, may have any name.
            key = "PEERLOOM_KEY_FILE=FILE " if event["is_private"] else ""
            lines.append(f"  On another machine:  {key}{elsewhere()} {join}")
        if not is_default_data_dir(Path(event["data_dir"]), self._environ):
            # In a second terminal, which may stand in another folder.
            status = command_span("status", "--data-dir", os.path.abspath(event["data_dir"]))
            lines.append(f"  On this machine:     {shown(status, program_from_anywhere)}")
        return lines

    def _alert(self, event: Event) -> list[str]:
        return [_at(event, f"alert: {event['text']}")]

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
        return [_at(event, f"measured again: {now.split(maxsplit=1)[1]}"), *rest]

    def _fences_tried(self, event: Event) -> list[str]:
        # That they all stand is what everybody expects.
        self._fences = []
        if event["unfenced"]:
            taken = "takes stages of others all the same" if event["is_allowed"] else "takes none of others"
            missing = "; ".join(event["unfenced"])
            self._fences = [labelled("fences", f"incomplete, {taken}: {missing}   (`peerloom doctor`)")]
        return self._fences if self._has_started else []

    def _join_tried(self, event: Event) -> list[str]:
        # A node keeps trying; only another outcome than last time is news.
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
        # Only a change is news, and that others get through is what everybody expects.
        before, self._reachable = self._reachable, event["reachable"]
        if event["reachable"] is False and before is not False:
            told = (
                f"{counted(event['asked'], 'other')} could not reach this node: it takes none of their stages"
            )
            return [_at(event, f"{told}; `peerloom doctor`")]
        if event["reachable"] and before is False:
            return [_at(event, "others reach this node now")]
        return []

    def _clock(self, event: Event) -> list[str]:
        if not event["seconds"]:
            return [_at(event, "this machine's clock agrees with its peers' again")]
        text = clock_text(event["seconds"], event["peers"])
        return [_at(event, f"{text}: {CLOCK_REMEDY}")]

    def _datagrams(self, event: Event) -> list[str]:
        if not event["peers"]:
            return [_at(event, "datagrams get through to all peers again")]
        count, of = len(event["peers"]), event["of"]
        text = (
            f"datagrams do not get through to {count} of {counted(of, 'peer')}: by stream; `peerloom doctor`"
        )
        return [_at(event, text)]

    def _identity_shared(self, event: Event) -> list[str]:
        where = " or ".join(map(short_address, event["addresses"])) or "an unknown place"
        goes = "it" if event["is_younger"] else "this one"
        text = f"another node has this node's identity, at {where}: {goes} began later, and stops"
        return [_at(event, text)]

    def _joined(self, event: Event) -> list[str]:
        self._names[event["peer"]] = event["name"]
        found = event["found_through"]
        through = f" (found through {found})" if found not in ("", "itself") else ""
        return [_at(event, f"{event['name']} {short_id(event['peer'])} joined{through}")]

    def _degraded(self, event: Event) -> list[str]:
        name, condition = self._name(event["peer"]), event["condition"]
        if not condition:
            return [_at(event, f"{name} answers in time again")]
        return [_at(event, f"{name} is degraded, {condition}: {event['reason']}")]

    def _stage_degraded(self, event: Event) -> list[str]:
        run, name = event["run"][:8], self._name(event["peer"])
        text = event["reason"] or "is as fast as promised again"
        return [_at(event, f"run {run} stage {event['stage'] + 1}: {name} {text}")]

    def _suspected(self, event: Event) -> list[str]:
        return [_at(event, f"{self._name(event['peer'])} suspected by {self._name(event['by'])}")]

    def _refuted(self, event: Event) -> list[str]:
        return [_at(event, f"{self._name(event['peer'])} is alive after all")]

    def _lost(self, event: Event) -> list[str]:
        return [_at(event, f"{self._name(event['peer'])} lost ({event['reason']})")]

    def _left(self, event: Event) -> list[str]:
        return [_at(event, f"{self._name(event['peer'])} left")]

    def _accepted(self, event: Event) -> list[str]:
        self._steps[event["run"]] = event["steps"]
        what = f"{event['model']} on {data_text(event['data'])}, {counted(event['steps'], 'step')}"
        return [_at(event, f"run {event['run'][:8]} accepted: {what}, from {self._name(event['requester'])}")]

    def _planned(self, event: Event) -> list[str]:
        plan = f"plan {event['plan'][:8]}" + (f", height {event['height']}" if event["height"] else "")
        before = self._layers_of.get(event["run"])
        self._layers_of[event["run"]] = layers = tuple(map(tuple, event["layers"]))
        if event["restored_step"] is not None and before not in (None, layers):
            plan += f", layers moved after step {event['restored_step']}"
        elif event["restored_step"] is not None:
            plan += f", back to the checkpoint of step {event['restored_step']}"
        lines = [_at(event, f"run {event['run'][:8]} planned: {plan}")]
        for stage, (layers, replicas) in enumerate(zip(event["layers"], event["stages"], strict=True)):
            names = ", ".join(
                self._name(peer) + (" (standby)" if peer in event["standbys"] else "") for peer in replicas
            )
            lines.append(f"  stage {stage + 1}   {layers_text(*layers)}   {names}")
        lines.append(f"  trainer   {', '.join(self._name(peer) for peer in event['trainers'])}")
        if event["witnesses"]:
            lines.append(f"  witness   {', '.join(self._name(peer) for peer in event['witnesses'])}")
        if event["pauses_without"]:
            lines.append(f"  note      {self._risk(event)}")
        return lines

    def _covered(self, event: Event) -> list[str]:
        said = cover_text({**event, "stages": event["covers"]})
        return [_at(event, f"run {event['run'][:8]} covered: {with_names(said, self._names)}")]

    def _risk(self, event: Event) -> str:
        """Say what the death of one machine will do where the others could not decide how to go on."""
        names = " or ".join(self._name(peer) for peer in event["pauses_without"])
        if {*event["trainers"], *(peer for row in event["stages"] for peer in row)} <= {event["trainer"]}:
            return f"nobody else takes part: while {names} is down, the run waits"
        return f"if {names} stops, the run pauses until it is back; one more idle node would change that"

    def _changed(self, event: Event) -> list[str]:
        if event["state"] == "running" and not event["is_note"]:
            return []  # the plan says more
        reason = with_names(event["reason"], self._names)
        return [_at(event, f"run {event['run'][:8]} {event['state']}{': ' if reason else ''}{reason}")]

    def _resumed(self, event: Event) -> list[str]:
        parts = [
            counted(event["replayed"], "microbatch", "microbatches") + " replayed",
            counted(event["lost_steps"], "step") + " lost",
        ]
        if event["filled"]:
            parts.append(counted(len(event["filled"]), "replica") + " caught up")
        return [
            _at(
                event,
                f"run {event['run'][:8]} goes on at step {event['step'] + 1} after {event['seconds']:.1f} s: "
                + ", ".join(parts),
            )
        ]

    def _checkpoint_kept(self, event: Event) -> list[str]:
        size = bytes_text(event["size_bytes"])
        copies = counted(event["copies"], "peer")
        line = f"run {event['run'][:8]} checkpoint of step {event['step']}: {size} on {copies}"
        left = self._steps.get(event["run"], inf) - event["step"]
        if 0 < event["next_steps"] <= left:
            again = seconds_text(event["next_seconds"]) if event["next_seconds"] else ""
            line += f"; a lost stage costs up to {counted(event['next_steps'], 'step')}" + (
                again and f", {again}"
            )
        return [_at(event, line)]

    def _checkpoint_failed(self, event: Event) -> list[str]:
        line = f"run {event['run'][:8]} no checkpoint of step {event['step']}: {event['reason']}"
        return [_at(event, line)]

    def _leased(self, event: Event) -> list[str]:
        return [_at(event, f"leased to run {event['run'][:8]}: stage {event['stage'] + 1}")]

    def _dropped(self, event: Event) -> list[str]:
        replayed = counted(event["microbatches_replayed"], "microbatch", "microbatches") + " replayed"
        where = f"stage {event['stage'] + 1} at step {event['step'] + 1}"
        return [_at(event, f"{self._name(event['peer'])} lost from {where}; {replayed}")]

    def _committed(self, event: Event) -> list[str]:
        step = event["step"] + 1
        steps = self._steps.get(event["run"], 0)
        seconds = self._seconds.setdefault(event["run"], deque(maxlen=PACE_STEPS))
        seconds.append(event["seconds"])
        if event.get("counted", 0) > event["samples"]:
            self._counts_tokens.add(event["run"])
        if step > FIRST_STEPS and step % STEPS_APART and step != steps:
            return []
        if event.get("diverged"):
            return [f"step {step:>5}  skipped: {event['diverged']}"]
        line = f"step {step:>5}  loss {event['loss']:.4f}  {rate_text(event)}  peers {event['replicas']}"
        if event["utilisation"]:
            line += f"  bubble {100 * event['bubble']:.0f} %"
        if any(event["rounding"]):
            line += f"  rounding {max(event['rounding']):.1e}"
        left = (steps - step) * sum(seconds) / len(seconds)
        return [line + (f"  {seconds_text(max(1, round(left)))} left" if 0 < left < inf else "")]

    def _evaluated(self, event: Event) -> list[str]:
        if event.get("step") is not None:
            accuracy = "" if event["accuracy"] is None else f", accuracy {event['accuracy']:.3f}"
            best = (
                "the best so far"
                if event["best_step"] == event["step"]
                else f"best after step {event['best_step']}"
            )
            return [f"step {event['step']:>5}  validation loss {event['loss']:.4f}{accuracy}  {best}"]
        what = "tokens" if event["run"] in self._counts_tokens else "samples"
        if event["accuracy"] is None:
            return [f"loss {event['loss']:.4f} on {event['samples']} unseen {what}"]
        return [f"accuracy {event['accuracy']:.3f} on {event['samples']} unseen {what}"]

    def _ended(self, event: Event) -> list[str]:
        self._seconds.pop(event["run"], None)
        self._counts_tokens.discard(event["run"])
        self._layers_of.pop(event["run"], None)
        detail = f": {event['detail']}" if event["detail"] else ""
        return [_at(event, f"run {event['run'][:8]} {event['outcome']}{detail}")]

    def _differs(self, event: Event) -> list[str]:
        other = f"another result, {event['weights'][:12]}" if event["weights"] else "no result"
        return [_at(event, f"run {event['run'][:8]} ended with {other}, for {self._name(event['peer'])}")]

    def _released(self, event: Event) -> list[str]:
        return [_at(event, f"run {event['run'][:8]} goes on without this node")]

    def _peer_averages(self, event: Event) -> list[str]:
        with_us = counted(event["peers"], "other peer")
        return [_at(event, f"averaging {event['run']}: {self._name(event['peer'])} takes part, {with_us}")]

    def _peer_stopped(self, event: Event) -> list[str]:
        rest = f"{event['reason']}; {counted(event['peers'], 'other peer')}"
        return [_at(event, f"averaging {event['run']}: {self._name(event['peer'])} is out ({rest})")]

    def _liar_proved(self, event: Event) -> list[str]:
        said = LIES[event["said"]]
        return [_at(event, f"averaging {event['run']}: {self._name(event['peer'])} is out: it signed {said}")]

    def _averaged(self, event: Event) -> list[str]:
        line = f"averaging {event['run']}  step {event['step']}  "
        if event["outcome"] != "ok":
            return [_at(event, f"{line}nothing averaged: {event['reason']}")]
        moved = bytes_text(event["sent_bytes"] + event["received_bytes"])
        whose = f"{len(event['averaged'])} of {counted(event['members'], 'peer')}"
        line += f"ok {seconds_text(event['seconds'])}  {whose}  {moved}"
        if event.get("liars_max"):
            line += f"  {event['aggregate']}, survives {event['liars_max']} of them lying"
        else:
            line += f"  {event.get('aggregate', 'mean')}"
        return [_at(event, line + (f"  rounding {event['rounding']:.1e}" if event.get("rounding") else ""))]

    def _averaging_opened(self, event: Event) -> list[str]:
        who = admit_text(event["admit"], is_private=event["is_private"])
        return [_at(event, f"averaging {event['run']}: {who}; by {event['aggregate']}")]

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
        said = "serves others" if event["may_serve"] else f"serves no others now: {event['reason']}"
        before, self._offer = self._offer, said
        lines = [_at(event, said)] if said != before else []
        if event["sends_less"]:
            lines.append(_at(event, f"sends less now: {event['sends_less']}"))
        if event["unread"]:
            rules = ", ".join(event["unread"])
            lines.append(_at(event, f"this machine cannot measure, so does not keep: {rules}"))
        return lines

    def _configured(self, event: Event) -> list[str]:
        if not event["version"]:
            return []
        said = ", ".join(event["settings"]) or "none kept to"
        whose = event["name"] or short_id(event["key"])
        lines = [_at(event, f"settings of {whose}, version {event['version']}: {said}")]
        if event["skipped"]:
            lines.append(_at(event, f"settings that were skipped: {', '.join(event['skipped'])}"))
        return lines

    def _goal_set(self, event: Event) -> list[str]:
        wanted = f"{event['samples_per_second']:g} samples/s over {event['seconds']} s"
        return [_at(event, f"run {event['run'][:8]} is to train {wanted}; an alert says where it does not")]

    def _revised(self, event: Event) -> list[str]:
        rate = "" if event["learning_rate"] is None else f", learning rate {event['learning_rate']:g}"
        paused = ", paused" if event["is_paused"] else ""
        said = f"{counted(event['steps'], 'step')}, priority {event['priority']}{rate}{paused}"
        return [_at(event, f"run {event['run'][:8]} changed by its requester: {said}")]

    def _caught_up(self, event: Event) -> list[str]:
        took = f"{bytes_text(event['size_bytes'])} in {seconds_text(event['seconds'])}"
        return [_at(event, f"averaging {event['run']}: caught up with step {event['step']}, {took}")]

    def _refused(self, event: Event) -> list[str]:
        return [_at(event, f"refused {counted(event['count'], 'time')} so far: {event['reason']}")]

    def _short(self, event: Event) -> list[str]:
        holders = counted(event["holders"], "node")
        return [_at(event, f"record '{event['purpose']}' kept by {holders} of {event['wanted']} wanted")]

    def _stopped(self, event: Event) -> list[str]:
        return [_at(event, "said goodbye")]


def _service(_screen: EventScreen, event: Event) -> list[str]:
    name, stage = event["name"], event["stage"] + 1
    if not event["is_held"]:
        return [_at(event, f"service {name}: stage {stage} is held here no more: {event['detail']}")]
    ready = ", ".join(map(str, event["ready"]))
    return [
        _at(event, f"service {name}: stage {stage} is here; {ready} of {event['wished']} answer by stage")
    ]


def _answer_moved(screen: EventScreen, event: Event) -> list[str]:
    route = " -> ".join(map(screen._name, event["route"]))
    note = "" if event.get("is_exact", True) else " (other bits: text may differ)"
    return [_at(event, f"answer of {event['name']} goes on over {route}{note}: {event['reason']}")]


def _answer_ended(_screen: EventScreen, event: Event) -> list[str]:
    text = f"answer of {event['name']}: {event['outcome']}, {counted(event['tokens'], 'token')}"
    if event["first_seconds"] is not None:
        text += f", the first after {event['first_seconds']:.2f} s"
    if event["tokens_per_second"] is not None:
        text += f", {event['tokens_per_second']:.1f} a second"
    return [_at(event, text + (f": {event['detail']}" if event["detail"] else ""))]


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
    "RunAccepted": EventScreen._accepted,
    "RunPlanned": EventScreen._planned,
    "RunChanged": EventScreen._changed,
    "RunCovered": EventScreen._covered,
    "RunRevised": EventScreen._revised,
    "OfferChanged": EventScreen._offer_changed,
    "NodeConfigured": EventScreen._configured,
    "RunGoalSet": EventScreen._goal_set,
    "RunResumed": EventScreen._resumed,
    "CheckpointKept": EventScreen._checkpoint_kept,
    "CheckpointFailed": EventScreen._checkpoint_failed,
    "StageLeased": EventScreen._leased,
    "StageDegraded": EventScreen._stage_degraded,
    "ReplicaDropped": EventScreen._dropped,
    "StepCommitted": EventScreen._committed,
    "RunEvaluated": EventScreen._evaluated,
    "RunEnded": EventScreen._ended,
    "ResultDiffers": EventScreen._differs,
    "RunReleased": EventScreen._released,
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


def _at(event: Event, text: str) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(event["at_seconds"]))
    return f"{clock}   {text}"


def name_and_id(names: Mapping[str, str], peer: str) -> str:
    """Return how screens call a peer: its name, where it has one, and its short id."""
    name = names.get(peer)
    return f"{name} {short_id(peer)}" if name else short_id(peer)


def with_names(text: str, names: Mapping[str, str]) -> str:
    """Return a text that names peers by short id with the name beside each, where there is one."""
    for peer in names:
        text = text.replace(short_id(peer), name_and_id(names, peer))
    return text
