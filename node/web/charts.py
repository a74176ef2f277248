"""The course of each run, built from events: the points of its curve, and the marks on its time axis.

It is bounded: a curve that is full keeps every second point, so it stays complete and gets coarser. Not here:
the present state of a run, which is in `State`.
"""

from dataclasses import dataclass, field
from typing import Any

from crypto.identity import PeerId
from node import events
from node.text import counted
from node.web.views import peer_key

POINTS_MAX = 2_000
"""Maximum number of points: more than a chart has pixels. A point is some 60 bytes of JSON."""
MARKS_MAX = 256
RUNS_MAX = 64
POINT_COLUMNS = ("step", "at", "loss", "samples_per_second", "bubble", "utilisation", "sent_bytes")

Point = list[float | None]
Mark = list[Any]
"""(unix seconds, step, kind, text), where kind is death, dropped, leave, join, plan, resume, checkpoint,
validation, accuracy or state."""


@dataclass
class Course:
    """One run's points and marks. Only every `stride`-th step has a point."""

    points: list[Point] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    stride: int = 1
    step: int = 0
    peers: frozenset[bytes] = frozenset()
    former: frozenset[bytes] = frozenset()
    """The replicas of the previous plan. The event of a death may come after the plan that no longer has the
    dead replica."""

    def document(self) -> dict[str, Any]:
        """Return the course in the form that the page reads."""
        return {"columns": POINT_COLUMNS, "points": self.points, "marks": self.marks, "stride": self.stride}


class Charts:
    """Courses by run. `take` returns what an event adds, for a reader that has the rest already."""

    def __init__(self) -> None:
        self.courses: dict[str, Course] = {}

    def take(self, event: events.Event) -> tuple[list[tuple[str, Point]], list[tuple[str, Mark]]]:
        """Add one event; return the new points and marks, each with its run."""
        match event:
            case events.RunAccepted(run=run):
                self._course(run)
            case events.StepCommitted(run=run):
                course, point = self._course(run), _point(event)
                course.step = event.step + 1
                if event.step % course.stride == 0:
                    course.points.append(point)
                    _thin(course)
                return [(run, point)], []
            case events.MemberLost(peer=peer) | events.MemberLeft(peer=peer):
                kind = "death" if isinstance(event, events.MemberLost) else "leave"
                reason = event.reason if isinstance(event, events.MemberLost) else "left"
                touched = [
                    run for run, course in self.courses.items() if peer in course.peers | course.former
                ]
                return [], [self._mark(run, event, kind, f"{peer_key(peer)}: {reason}") for run in touched]
            case events.RunPlanned(run=run):
                return [], self._planned(event)
            case _:
                text = _mark_text(event)
                if text is not None:
                    run = getattr(event, "run", "")
                    return [], [self._mark(run, event, *text)]
        return [], []

    def _planned(self, event: events.RunPlanned) -> list[tuple[str, Mark]]:
        course = self._course(event.run)
        peers = frozenset(bytes(peer) for stage in event.stages for peer in stage)
        peers |= {bytes(peer) for peer in event.trainers}
        joined = [] if not course.peers else sorted(peers - course.peers)
        course.former, course.peers = course.peers, peers
        marks = [
            self._mark(
                event.run, event, "plan", f"plan {event.height}: {counted(len(event.stages), 'stage')}"
            )
        ]
        for peer in joined:
            marks.append(self._mark(event.run, event, "join", f"{peer_key(PeerId(peer))} takes part"))
        return marks

    def _mark(self, run: str, event: events.Event, kind: str, text: str) -> tuple[str, Mark]:
        course = self._course(run)
        step = getattr(event, "step", None)
        mark = [event.at, course.step if step is None else step, kind, text]
        course.marks.append(mark)
        if len(course.marks) > MARKS_MAX:
            del course.marks[0]
        return run, mark

    def _course(self, run: str) -> Course:
        course = self.courses.setdefault(run, Course())
        if len(self.courses) > RUNS_MAX:
            del self.courses[next(iter(self.courses))]
        return course


def _point(event: events.StepCommitted) -> Point:
    rate = event.samples / event.seconds if event.seconds > 0 else None
    used = sum(event.utilisation) / len(event.utilisation) if event.utilisation else None
    sent = sum(event.sent_bytes) + sum(event.returned_bytes)
    return [event.step, event.at, event.loss, rate, event.bubble, used, sent]


def _thin(course: Course) -> None:
    if len(course.points) > POINTS_MAX:
        course.stride *= 2
        course.points = [point for point in course.points if (point[0] or 0) % course.stride == 0]


def _mark_text(event: events.Event) -> tuple[str, str] | None:
    """Return the kind and the text of a mark; None for an event without a mark."""
    match event:
        case events.ReplicaDropped():
            replayed = event.microbatches_replayed
            return (
                "dropped",
                f"{peer_key(event.peer)} dropped from stage {event.stage + 1}, {replayed} replayed",
            )
        case events.RunResumed():
            return "resume", f"continued after {event.seconds:.1f} s, {event.replayed} replayed"
        case events.CheckpointKept():
            return "checkpoint", f"kept on {counted(event.copies, 'member')}"
        case events.RunEvaluated(step=int()):
            return "validation", f"loss {event.loss:.4f}, best after step {event.best_step}"
        case events.RunEvaluated(accuracy=float(accuracy)):
            return "accuracy", f"{accuracy:.4f} on {counted(event.samples, 'sample')}"
        case events.RunChanged() | events.RunEnded():
            word = event.state if isinstance(event, events.RunChanged) else event.outcome
            why = event.reason if isinstance(event, events.RunChanged) else event.detail
            return "state", f"{word}{': ' + why if why else ''}"
        case _:
            return None
