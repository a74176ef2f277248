"""`/metrics`: the counters and state of this node, in the text format of Prometheus.

Names begin with `peerloom_`, have base units and are never renamed. Label values are bounded: statuses, kinds
of events and reasons that our own code defines, and a limited number of models (`node.web.model_metrics`).
Peers and runs are not labels, because their number is not bounded. Events are counted from the start of the
page on; everything else is read on request.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import psutil
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from node import events, serving_events
from node.alerts.rules import KINDS
from node.counter_names import TRAFFIC
from node.event_kinds import EVENT_KINDS
from node.protocols.services import Listing, Service
from node.services.energy import EnergyMeter
from node.state import State
from node.web.model_metrics import ModelMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STEP_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
STAGES_MAX = 64
MEMBER_STATUSES = ("alive", "suspect", "dead", "left")


class Metrics:
    """Counts events, and writes all metrics on request."""

    def __init__(self) -> None:
        self._kinds: Counter[str] = Counter()
        self._sums: Counter[str] = Counter()
        self._last: events.StepCommitted | None = None
        self._accuracy: float | None = None
        self._meter = EnergyMeter()
        self._steps = Histogram(
            "peerloom_step_seconds",
            "Time from a step's opening to its commit, for runs that this node is in. Steps that were lost "
            "and committed again after a checkpoint count each time; placing and resuming are not counted.",
            buckets=STEP_BUCKETS,
            registry=None,
        )
        self.models = ModelMetrics()
        self._mean = Histogram(
            "peerloom_answer_token_seconds",
            "Mean time between the tokens of an answer, with one observation for each answer. Answers of "
            "one token are not counted.",
            buckets=TOKEN_BUCKETS,
            registry=None,
        )

    def take(self, event: events.Event) -> None:
        """Count one event."""
        self._kinds[type(event).__name__] += 1
        match event:
            case events.StepCommitted():
                self._last = event
                self._sums["samples"] += event.samples
                self._sums["forward"] += sum(event.sent_bytes)
                self._sums["backward"] += sum(event.returned_bytes)
                self._steps.observe(event.seconds)
            case events.ReplicaDropped():
                self._sums["replayed"] += event.microbatches_replayed
            case events.RunResumed():
                self._sums["lost"] += event.lost_steps
            case events.RunEvaluated():
                self._accuracy = event.accuracy
            case serving_events.GenerationEnded():
                self.models.ended(event)
                if event.tokens_per_second:
                    self._mean.observe(1 / event.tokens_per_second)

    def text(
        self,
        state: State,
        counters: Mapping[str, int],
        own: Mapping[str, float],
        version: str,
        held: Iterable[tuple[Service, Listing]] = (),
    ) -> bytes:
        """Return all metrics in the text format. `own` are the page's own gauges by name. `held` are the
        services with a stage here, and the state of that stage."""
        registry = CollectorRegistry(auto_describe=False)
        told = [
            *self._told(),
            *self.models.families(held),
            *_present(state, counters),
            *_own(own, version),
            self._energy(),
        ]
        registry.register(_Collected(told))
        for histogram in (self._steps, self._mean, *self.models.histograms):
            registry.register(histogram)
        return generate_latest(registry)

    def _told(self) -> Iterable[Metric]:
        """Return the metrics that are counted from events."""
        happened = CounterMetricFamily(
            "peerloom_events",
            "Events of this node by kind. Refusals below a threshold are counted, but are no events.",
            labels=["kind"],
        )
        for kind in sorted(EVENT_KINDS):
            happened.add_metric([kind], self._kinds[kind])
        yield happened
        yield _counter(
            "steps_committed", "Steps committed in runs that this node is in.", self._kinds["StepCommitted"]
        )
        yield _counter(
            "samples", "Samples of committed steps. Replays are not counted.", self._sums["samples"]
        )
        yield _counter(
            "replicas_dropped",
            "Replicas that died in a step, as this node saw it.",
            self._kinds["ReplicaDropped"],
        )
        yield _counter(
            "microbatches_replayed",
            "Micro-batches computed again because the replica that had summed them is gone. Those of steps "
            "that were undone by a checkpoint are not counted.",
            self._sums["replayed"],
        )
        yield _counter("steps_lost", "Steps computed again from a checkpoint.", self._sums["lost"])
        sent = CounterMetricFamily(
            "peerloom_frame_bytes",
            "Bytes of frames between stages in committed steps, for all stages of a run, not only this "
            "node's. Framing, gossip and checkpoints are not counted.",
            labels=["direction"],
        )
        for direction in ("forward", "backward"):
            sent.add_metric([direction], self._sums[direction])
        yield sent
        yield from self._last_step()

    def _energy(self) -> Metric:
        used = CounterMetricFamily(
            "peerloom_energy_joules",
            "Energy of the whole machine since the page was opened, by the source that counts it. It "
            "includes other programs' work. Empty if the hardware does not count energy.",
            labels=["source"],
        )
        for source, joules in self._meter.read().items():
            used.add_metric([source], joules)
        return used

    def _last_step(self) -> Iterable[Metric]:
        step = self._last
        yield _gauge("last_loss", "Loss of the newest step of any run.", step.loss if step else None)
        yield _gauge(
            "last_bubble_ratio",
            "Share of the newest step that no replica computed.",
            step.bubble if step else None,
        )
        yield _gauge("last_replicas", "Replicas of the newest step.", step.replicas if step else None)
        yield _gauge("last_accuracy_ratio", "Accuracy of the newest evaluation.", self._accuracy)
        used = GaugeMetricFamily(
            "peerloom_stage_utilisation_ratio",
            "Share of the newest step that a stage's replicas spent computing, without waiting.",
            labels=["stage"],
        )
        for stage, share in enumerate(step.utilisation[:STAGES_MAX] if step else ()):
            used.add_metric([str(stage)], share)
        yield used


class _Collected:
    """An adapter that gives existing metrics to prometheus-client."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics


def _present(state: State, counters: Mapping[str, int]) -> Iterable[Metric]:
    """Return the metrics of the present `State`, and the counters."""
    members = GaugeMetricFamily(
        "peerloom_members",
        "Other members that this node lists, by status, without this node.",
        labels=["status"],
    )
    statuses = Counter(member.status for member in state.members.values())
    for status in MEMBER_STATUSES:
        members.add_metric([status], statuses[status])
    yield members
    runs = GaugeMetricFamily("peerloom_runs", "Runs that this node knows, by status.", labels=["status"])
    for status, count in sorted(Counter(view.status for view in state.runs.values()).items()):
        runs.add_metric([status], count)
    yield runs
    alerts = GaugeMetricFamily("peerloom_alerts", "Alerts that are raised now, by kind.", labels=["kind"])
    raised = Counter(alert.alert for alert in state.alerts.values())
    for kind in KINDS:
        alerts.add_metric([kind], raised[kind])
    yield alerts
    traffic = CounterMetricFamily("peerloom_traffic", "Successes in the transport, by kind.", labels=["what"])
    refused = CounterMetricFamily(
        "peerloom_refused",
        "Refusals, drops and failures at every layer, by reason. A reason appears once it has occurred.",
        labels=["reason"],
    )
    for name, count in sorted(counters.items()):
        (traffic if name in TRAFFIC else refused).add_metric([name], count)
    yield traffic
    yield refused
    reach = state.reachability.reachable if state.reachability is not None else None
    yield _gauge(
        "reachable", "1 if others can reach this node, 0 if not, and absent if no peer has tried.", reach
    )
    offer = state.capacity
    yield _gauge("offered_memory_bytes", "Memory offered when measured.", offer and offer.memory_free_bytes)
    yield _gauge("offered_flops_per_second", "Speed when measured, fp32.", offer and offer.flops_per_second)
    yield _gauge(
        "start_time_seconds", "Unix time at which this node started.", state.started and state.started.at
    )


def _own(own: Mapping[str, float], version: str) -> Iterable[Metric]:
    """Return the metrics of the process and the page."""
    process = psutil.Process()
    with process.oneshot():
        times, memory = process.cpu_times(), process.memory_info().rss
    yield _counter(
        "process_cpu_seconds",
        "Processor time of the node's own process, without the processes of stages.",
        times.user + times.system,
    )
    yield _gauge("process_resident_memory_bytes", "Memory of the node's own process.", memory)
    for name, value in own.items():
        yield _gauge(name, "A figure of the page, described by its name.", value)
    yield InfoMetricFamily("peerloom_build", "The running version.", {"version": version})


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"peerloom_{name}", text, value=value)


def _gauge(name: str, text: str, value: Any) -> Metric:
    metric = GaugeMetricFamily(f"peerloom_{name}", text)
    if value is not None:
        metric.add_metric([], float(value))
    return metric
