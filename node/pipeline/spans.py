"""Spans of this node's stages: their computations with times, as part of a trace over all machines of a run.

A trace is a step. Its id is a hash of run and step, which every frame carries anyway. So every member knows
the id, and nothing is added to the wire. Spans are always recorded, as one tuple per pass, in bounded memory;
`node.runs.traces` sends them on request.
"""

from collections import deque
from collections.abc import Collection, Iterator
from typing import Annotated, Literal

import msgspec
from blake3 import blake3

from crypto.identity import PeerId
from partition import stage as api
from partition.plan.plan import Plan

SPANS_KEPT_MAX = 20_000
"""Maximum number of spans kept: about 4 MB, or a thousand steps of ten micro-batches."""
ROSTERS_KEPT_MAX = 16
FORMER_MAX = 64
"""Maximum number of former holders of one run's stages, those of the newest plans, that are asked for
spans."""
TRACE_ID_BYTES = 16

Kind = Literal["forward", "backward", "apply", "other"]
_KINDS: dict[type, Kind] = {api.Forward: "forward", api.Backward: "backward", api.Apply: "apply"}
_Nanoseconds = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Layer = Annotated[int, msgspec.Meta(ge=0, le=2**31)]
_Number = Annotated[int, msgspec.Meta(ge=-1, le=2**53)]


class Span(msgspec.Struct, frozen=True, array_like=True):
    """One request to a stage's process. `begun` is Unix time by this node's clock. `busy` is the process's
    computing time; the rest of `lasted` is waiting and copying. Micro-batch -1: none. A span has its stage's
    layers, because they change with the plan; both are 0 from older versions."""

    step: _Number
    stage: Annotated[int, msgspec.Meta(ge=0, le=4_096)]
    microbatch: _Number
    kind: Kind
    begun: _Nanoseconds
    lasted: _Nanoseconds
    busy: _Nanoseconds
    first_layer: _Layer = 0
    last_layer: _Layer = 0


class Spans:
    """The newest spans of all runs, and the peers that may request them."""

    def __init__(self) -> None:
        self._spans: deque[tuple[bytes, Span]] = deque(maxlen=SPANS_KEPT_MAX)
        self._rosters: dict[bytes, frozenset[bytes]] = {}
        self._holders: dict[bytes, tuple[tuple[PeerId, ...], tuple[PeerId, ...]]] = {}

    def add(self, run: bytes, span: Span) -> None:
        """Keep a span, replacing the oldest if necessary."""
        self._spans.append((run, span))

    def record(
        self,
        plan: Plan,
        stage: int,
        step: int | None,
        request: api.Request,
        begun: float,
        lasted: float,
        busy: int,
    ) -> None:
        """Keep the span of a request to a stage's process; `step` is used if the request names none."""
        microbatch, step = getattr(request, "microbatch", -1), getattr(request, "step", step)
        row = plan.stages[stage]
        span = Span(
            step if isinstance(step, int) else -1,
            stage,
            microbatch if isinstance(microbatch, int) else -1,
            _KINDS.get(type(request), "other"),
            int(begun * 1e9),
            int(lasted * 1e9),
            busy,
            row.first_layer,
            row.last_layer,
        )
        self.add(plan.run, span)

    def admit(self, plan: Plan) -> None:
        """Allow the members of this plan, like those of earlier plans, to ask for the spans of its run, even
        after it has ended."""
        before = self._rosters.pop(plan.run, frozenset())
        self._rosters[plan.run] = before | frozenset(plan.roster) | frozenset(plan.members)
        now = tuple(PeerId(peer) for stage in plan.stages for peer in stage.replicas)
        known = dict.fromkeys(peer for peers in self._holders.get(plan.run, ()) for peer in peers)
        self._holders[plan.run] = now, tuple(peer for peer in known if peer not in now)[:FORMER_MAX]
        while len(self._rosters) > ROSTERS_KEPT_MAX:
            oldest = next(iter(self._rosters))
            del self._rosters[oldest]
            self._holders.pop(oldest, None)

    def holders(self, run: bytes, live: Collection[PeerId]) -> list[PeerId]:
        """Return the holders of a run's stages, followed by the `live` holders of earlier plans."""
        now, before = self._holders.get(run, ((), ()))
        return [*now, *(peer for peer in before if peer in live)]

    @property
    def runs(self) -> tuple[bytes, ...]:
        """The runs whose members may ask."""
        return tuple(self._rosters)

    def may_ask(self, run: bytes, peer: bytes) -> bool:
        """Return whether a peer is or was a member of a run that this node computed for."""
        return peer in self._rosters.get(run, frozenset())

    def of(self, run: bytes, first: int, last: int) -> Iterator[Span]:
        """Return the spans of steps `first` to `last` of a run, in the order in which they ended."""
        return (span for name, span in self._spans if name == run and first <= span.step <= last)

    def last_step(self, run: bytes) -> int:
        """Return the newest step of a run with a span here; -1 if there is none."""
        return max((span.step for name, span in self._spans if name == run), default=-1)


def trace_id(run: bytes, step: int) -> bytes:
    """Return the id of a step's trace, which is the same on every member."""
    return blake3(b"peerloom trace" + run + step.to_bytes(8, "big")).digest()[:TRACE_ID_BYTES]
