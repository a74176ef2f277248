"""Events of runs as lines: the part of `node.cli.screen` for a run, from its plan to its end."""

from collections import deque
from collections.abc import Mapping
from math import inf
from typing import Any

from node.cli.event_text import Event, at_clock, with_names
from node.cli.render import bytes_text, data_text, seconds_text, short_id
from node.text import counted, cover_text, layers_text

FIRST_STEPS = 5
"""Up to this step, every step is shown. After it, only every STEPS_APART-th is shown, so that the curve stays
readable."""
PACE_STEPS = 20
"""The remaining time is estimated from the mean of this many steps, so that one slow step does not
dominate."""
STEPS_APART = 10


def rate_text(step: Mapping[str, Any]) -> str:
    """Return the rate of a committed step in samples, and in tokens if the loss counts tokens."""
    if step["seconds"] <= 0:
        return "0 samples/s"
    text = f"{step['samples'] / step['seconds']:.0f} samples/s"
    if step.get("counted", 0) > step["samples"]:
        text += f"  {step['counted'] / step['seconds']:.0f} tokens/s"
    return text


class RunLines:
    """Turns a sequence of events of runs into lines. `names` are the names of peers."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names
        self._steps: dict[str, int] = {}
        self._layers_of: dict[str, tuple[tuple[int, ...], ...]] = {}
        self._seconds: dict[str, deque[float]] = {}
        self._counts_tokens: set[str] = set()

    def lines(self, event: Event) -> list[str]:
        """Return the lines for one event; an empty list if its kind is not shown, or it is not about a
        run."""
        render = _RENDERERS.get(event["kind"])
        return render(self, event) if render is not None else []

    def _name(self, peer: str) -> str:
        return self._names.get(peer) or short_id(peer)

    def _stage_degraded(self, event: Event) -> list[str]:
        run, name = event["run"][:8], self._name(event["peer"])
        text = event["reason"] or "is as fast as promised again"
        return [at_clock(event, f"run {run} stage {event['stage'] + 1}: {name} {text}")]

    def _accepted(self, event: Event) -> list[str]:
        self._steps[event["run"]] = event["steps"]
        what = f"{event['model']} on {data_text(event['data'])}, {counted(event['steps'], 'step')}"
        return [
            at_clock(event, f"run {event['run'][:8]} accepted: {what}, from {self._name(event['requester'])}")
        ]

    def _planned(self, event: Event) -> list[str]:
        plan = f"plan {event['plan'][:8]}" + (f", height {event['height']}" if event["height"] else "")
        before = self._layers_of.get(event["run"])
        self._layers_of[event["run"]] = layers = tuple(map(tuple, event["layers"]))
        if event["restored_step"] is not None and before not in (None, layers):
            plan += f", layers moved after step {event['restored_step']}"
        elif event["restored_step"] is not None:
            plan += f", back to the checkpoint of step {event['restored_step']}"
        lines = [at_clock(event, f"run {event['run'][:8]} planned: {plan}")]
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
        return [at_clock(event, f"run {event['run'][:8]} covered: {with_names(said, self._names)}")]

    def _risk(self, event: Event) -> str:
        """Describe what happens if one machine dies and the others cannot form a majority."""
        names = " or ".join(self._name(peer) for peer in event["pauses_without"])
        if {*event["trainers"], *(peer for row in event["stages"] for peer in row)} <= {event["trainer"]}:
            return f"nobody else takes part: while {names} is down, the run waits"
        return f"if {names} stops, the run pauses until it is back; one more idle node would change that"

    def _changed(self, event: Event) -> list[str]:
        if event["state"] == "running" and not event["is_note"]:
            return []  # the plan's own event says more
        reason = with_names(event["reason"], self._names)
        return [at_clock(event, f"run {event['run'][:8]} {event['state']}{': ' if reason else ''}{reason}")]

    def _resumed(self, event: Event) -> list[str]:
        parts = [
            counted(event["replayed"], "microbatch", "microbatches") + " replayed",
            counted(event["lost_steps"], "step") + " lost",
        ]
        if event["filled"]:
            parts.append(counted(len(event["filled"]), "replica") + " caught up")
        return [
            at_clock(
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
        return [at_clock(event, line)]

    def _checkpoint_failed(self, event: Event) -> list[str]:
        line = f"run {event['run'][:8]} no checkpoint of step {event['step']}: {event['reason']}"
        return [at_clock(event, line)]

    def _leased(self, event: Event) -> list[str]:
        return [at_clock(event, f"leased to run {event['run'][:8]}: stage {event['stage'] + 1}")]

    def _dropped(self, event: Event) -> list[str]:
        replayed = counted(event["microbatches_replayed"], "microbatch", "microbatches") + " replayed"
        where = f"stage {event['stage'] + 1} at step {event['step'] + 1}"
        return [at_clock(event, f"{self._name(event['peer'])} lost from {where}; {replayed}")]

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
        return [at_clock(event, f"run {event['run'][:8]} {event['outcome']}{detail}")]

    def _differs(self, event: Event) -> list[str]:
        other = f"another result, {event['weights'][:12]}" if event["weights"] else "no result"
        return [
            at_clock(event, f"run {event['run'][:8]} ended with {other}, for {self._name(event['peer'])}")
        ]

    def _released(self, event: Event) -> list[str]:
        return [at_clock(event, f"run {event['run'][:8]} goes on without this node")]

    def _goal_set(self, event: Event) -> list[str]:
        run = f"run {event['run'][:8]}"
        if not event["samples_per_second"]:
            return [at_clock(event, f"{run} has no goal any more")]
        wanted = f"{event['samples_per_second']:g} samples/s over {event['seconds']} s"
        return [at_clock(event, f"{run} is to train {wanted}; an alert says where it does not")]

    def _revised(self, event: Event) -> list[str]:
        rate = "" if event["learning_rate"] is None else f", learning rate {event['learning_rate']:g}"
        paused = ", paused" if event["is_paused"] else ""
        said = f"{counted(event['steps'], 'step')}, priority {event['priority']}{rate}{paused}"
        return [at_clock(event, f"run {event['run'][:8]} changed by its requester: {said}")]


_RENDERERS = {
    "RunAccepted": RunLines._accepted,
    "RunPlanned": RunLines._planned,
    "RunChanged": RunLines._changed,
    "RunCovered": RunLines._covered,
    "RunRevised": RunLines._revised,
    "RunGoalSet": RunLines._goal_set,
    "RunResumed": RunLines._resumed,
    "CheckpointKept": RunLines._checkpoint_kept,
    "CheckpointFailed": RunLines._checkpoint_failed,
    "StageLeased": RunLines._leased,
    "StageDegraded": RunLines._stage_degraded,
    "ReplicaDropped": RunLines._dropped,
    "StepCommitted": RunLines._committed,
    "RunEvaluated": RunLines._evaluated,
    "RunEnded": RunLines._ended,
    "ResultDiffers": RunLines._differs,
    "RunReleased": RunLines._released,
}
