"""Strategies for the parameters between two rounds of averaging: one small class for each paper.

A strategy turns the parameters theta after some local steps into the vector to average (`offer`), and the
round's result into the parameters to continue with (`take`). All strategies work on flat vectors of one
layout; nothing here knows of groups, peers or torch. A failed round changes nothing: training continues, and
the next round offers all changes since the last successful one. If training continued while a round ran
(delayed averaging), `Delayed` adds the difference.

Members of a strategy with outer steps agree on `phi`, at least approximately: a peer that joins late loads it
from another peer (`state`, `load`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from gossip.averaging.codecs import Codec, codec_of
from gossip.averaging.feedback import ErrorFeedback
from gossip.averaging.group import Mode
from gossip.averaging.robust.reduction import Vector

Grouping = Literal["all", "moshpit", "pairs"]


@dataclass(frozen=True)
class Mean:
    """The result of a round. `is_included` says whether this peer's own offer is part of it; `stale_steps`
    counts the local steps since the offer."""

    vector: Vector
    is_included: bool = True
    stale_steps: int = 0


class Strategy(Protocol):
    """A strategy for training together."""

    local_steps: int
    """Number of steps between two rounds."""
    grouping: Grouping
    mode: Mode
    codec: str

    def offer(self, theta: Vector) -> Vector:
        """Return the vector to average now: a new vector of the same size."""

    def take(self, theta: Vector, mean: Mean | None) -> Vector:
        """Return the parameters to continue with, as a new vector. `theta` is the vector passed to `offer`;
        `mean` is None if the round failed."""

    def state(self) -> dict[str, Vector]:
        """Return the state that a peer joining late needs in addition to theta."""

    def load(self, state: Mapping[str, Vector]) -> None:
        """Load a state that another peer's `state` returned."""


class _Stateless:
    """A strategy without memory between rounds."""

    def state(self) -> dict[str, Vector]:
        return {}

    def load(self, state: Mapping[str, Vector]) -> None:
        if state:
            raise ValueError(f"this strategy has no state, but was given {', '.join(sorted(state))}")


class ParameterMean(_Stateless):
    """The mean of parameters every H steps (local SGD, Stich 2019); in pairs, gossip (Lian et al. 2017).

    The rounding error of an int8 or int4 codec is added to the next round's vector (error feedback), so
    errors do not accumulate.
    """

    mode: Mode = "butterfly"

    def __init__(self, local_steps: int, grouping: Grouping = "moshpit", codec: str = "float32") -> None:
        self.local_steps = local_steps
        self.grouping = grouping
        self.codec = codec
        self._feedback = ErrorFeedback(codec_of(codec, "float32")) if codec in ("int8", "int4") else None

    def offer(self, theta: Vector) -> Vector:
        return theta.copy() if self._feedback is None else self._feedback.add(theta)

    def take(self, theta: Vector, mean: Mean | None) -> Vector:
        if self._feedback is not None:
            self._feedback.settle(is_included=mean is not None and mean.is_included)
        return (theta if mean is None else mean.vector).copy()


class Asynchronous(_Stateless):
    """Mixes in a mean, weighted by its freshness (FedAsync, Xie et al. 2019, polynomial staleness).

    theta <- theta + a (1 + s)^(-1/2) (mean - offered), where s counts the local steps since the offer. A mean
    older than `stale_steps_max` steps is discarded. No peer waits for another.
    """

    mode: Mode = "butterfly"

    def __init__(
        self,
        local_steps: int,
        stale_steps_max: int,
        mixing: float = 1.0,
        grouping: Grouping = "pairs",
        codec: str = "float32",
    ) -> None:
        self.local_steps = local_steps
        self.stale_steps_max = stale_steps_max
        self.mixing = mixing
        self.grouping = grouping
        self.codec = codec
        self.dropped_count = 0

    def offer(self, theta: Vector) -> Vector:
        return theta.copy()

    def take(self, theta: Vector, mean: Mean | None) -> Vector:
        if mean is None or mean.stale_steps > self.stale_steps_max:
            self.dropped_count += mean is not None
            return theta.copy()
        share = self.mixing * (1 + mean.stale_steps) ** -0.5
        return theta + theta.dtype.type(share) * (mean.vector - theta)


class DiLoCo:
    """Outer Nesterov steps on the mean of H local steps (Douillard et al. 2023, algorithm 1).

    delta = mean(phi - theta); m <- mu m + delta; phi <- phi - a (delta + mu m); theta <- phi. All peers
    average in one group and hold the same phi. The errors of a lossy codec are fed back.
    """

    grouping: Grouping = "all"

    def __init__(
        self,
        theta: Vector,
        local_steps: int,
        rate: float = 0.7,
        momentum: float = 0.9,
        codec: str = "float32",
    ) -> None:
        self.local_steps = local_steps
        self.codec = codec
        self._rate = theta.dtype.type(rate)
        self._momentum = theta.dtype.type(momentum)
        self._phi = theta.copy()
        self._m = np.zeros_like(theta)
        coder = codec_of(codec, str(theta.dtype))
        self._feedback = None if coder.is_exact else ErrorFeedback(coder)
        self.mode: Mode = "exchange" if codec.startswith("topk") else "butterfly"

    def offer(self, theta: Vector) -> Vector:
        delta = self._phi - theta
        return delta if self._feedback is None else self._feedback.add(delta)

    def take(self, theta: Vector, mean: Mean | None) -> Vector:
        if self._feedback is not None:
            self._feedback.settle(is_included=mean is not None and mean.is_included)
        if mean is None:
            return theta.copy()
        # no peer has made a step: momentum alone must not move the phi that all agree on
        if not mean.vector.any():
            return self._phi.copy()
        self._m = self._momentum * self._m + mean.vector
        self._phi = self._phi - self._rate * (mean.vector + self._momentum * self._m)
        return self._phi.copy()

    def state(self) -> dict[str, Vector]:
        return {"phi": self._phi, "momentum": self._m}

    def load(self, state: Mapping[str, Vector]) -> None:
        self._phi, self._m = state["phi"].copy(), state["momentum"].copy()


class NoLoCo:
    """Outer steps in small groups; a correction pulls the copies of phi together (Kolehmainen et al. 2025).

    g = mean(theta - phi) + mean(phi) - phi_i, m <- mu m + g, phi <- phi + a (g + mu m), theta <- phi, means
    over the group. g equals mean(theta) - phi_i, so averaging theta is enough: half the bytes of averaging
    both. Plain momentum of 0.9 pulls a phi too far; Nesterov's form is stable.

    A peer that has made no local step since its previous round takes the mean unchanged: additional rounds at
    the end only pull the copies together (the tightening of Factored Gossip DiLoCo). After one round along
    one axis of the grid, a copy still carries the noise of its own group. A peer that misses a round counts
    as a group of its own. Otherwise it would fall behind the momentum of the others, and their next mean
    would add that lag to its own momentum. Its parameters stay as they are; its next offer is shifted
    instead.
    """

    mode: Mode = "butterfly"

    def __init__(
        self,
        theta: Vector,
        local_steps: int,
        rate: float = 0.7,
        momentum: float = 0.9,
        grouping: Grouping = "moshpit",
        codec: str = "float32",
    ) -> None:
        self.local_steps = local_steps
        self.grouping = grouping
        self.codec = codec
        self._rate = theta.dtype.type(rate)
        self._momentum = theta.dtype.type(momentum)
        self._phi = theta.copy()
        self._m = np.zeros_like(theta)
        self._before = self._phi
        """The parameters after the previous round. If they are unchanged, no local step was made."""
        self._missed: Vector | None = None
        self._ahead: Vector | None = None

    def offer(self, theta: Vector) -> Vector:
        if self._missed is not None:
            missed, self._missed = self._missed, None
            self._move(missed - self._phi)
            self._ahead = self._phi - missed if self._ahead is None else self._ahead + (self._phi - missed)
        return theta.copy() if self._ahead is None else theta + self._ahead

    def take(self, theta: Vector, mean: Mean | None) -> Vector:
        is_idle = np.array_equal(theta, self._before)
        if mean is None:
            if not is_idle:
                self._missed = theta.copy() if self._ahead is None else theta + self._ahead
                self._before = theta.copy()
            return theta.copy()
        if is_idle:
            self._phi = mean.vector.copy()
        else:
            self._move(mean.vector - self._phi)
        self._before, self._ahead = self._phi, None
        return self._phi.copy()

    def _move(self, step: Vector) -> None:
        self._m = self._momentum * self._m + step
        self._phi = self._phi + self._rate * (step + self._momentum * self._m)

    def state(self) -> dict[str, Vector]:
        return {"phi": self._phi, "momentum": self._m}

    def load(self, state: Mapping[str, Vector]) -> None:
        self._phi, self._m = state["phi"].copy(), state["momentum"].copy()
        self._before, self._missed, self._ahead = self._phi, None, None


class SparseLoCo:
    """Chunked top-k with 2 bits per value, and error feedback in place of outer momentum (Sarfi et al. 2025).

    e <- b e + (phi - theta); s = topk(e); e <- e - s; phi <- phi - a mean(s); theta <- phi. Payloads are
    exchanged whole, because a sum of sparse parts is not sparse. Nesterov momentum helps if there are only a
    few outer steps.
    """

    grouping: Grouping = "all"
    mode: Mode = "exchange"

    def __init__(
        self,
        theta: Vector,
        local_steps: int,
        rate: float = 1.0,
        decay: float = 0.95,
        momentum: float = 0.0,
        codec: str = "topk64",
    ) -> None:
        self.local_steps = local_steps
        self.codec = codec
        self._rate = theta.dtype.type(rate)
        self._phi = theta.copy()
        self._momentum = theta.dtype.type(momentum)
        self._m = np.zeros_like(theta)
        coder: Codec = codec_of(codec, str(theta.dtype))
        self._feedback = ErrorFeedback(coder, decay)

    def offer(self, theta: Vector) -> Vector:
        return self._feedback.add(self._phi - theta)

    def take(self, theta: Vector, mean: Mean | None) -> Vector:
        self._feedback.settle(is_included=mean is not None and mean.is_included)
        if mean is None:
            return theta.copy()
        # no peer has made a step: momentum alone must not move the phi that all agree on
        if not mean.vector.any():
            return self._phi.copy()
        self._m = self._momentum * self._m + mean.vector
        self._phi = self._phi - self._rate * (mean.vector + self._momentum * self._m)
        return self._phi.copy()

    def state(self) -> dict[str, Vector]:
        return {"phi": self._phi, "momentum": self._m}

    def load(self, state: Mapping[str, Vector]) -> None:
        self._phi, self._m = state["phi"].copy(), state["momentum"].copy()
        self._feedback.residual = None


def damped(theta: Vector, taken: Vector, damping: float) -> Vector:
    """Return theta + damping (taken - theta): apply only this share of a round's change.

    `theta` is the vector passed to `offer`, `taken` is what `Strategy.take` returned for it. This is only for
    strategies without outer steps, because outer steps are computed from a phi that must equal theta.
    """
    return taken if damping == 1 else theta + theta.dtype.type(damping) * (taken - theta)


class Delayed:
    """Any strategy, with training continuing while the round runs (delayed parameter averaging).

    theta <- take(theta at the offer) + the local steps since.
    """

    def __init__(self, strategy: Strategy) -> None:
        self.strategy = strategy
        self._offered: Vector | None = None
        self._damping = 1.0

    def offer(self, theta: Vector, damping: float = 1.0) -> Vector:
        """Return the vector to average. `take` then applies the share `damping` of the round's change."""
        self._offered = theta.copy()
        self._damping = damping
        return self.strategy.offer(theta)

    def take(self, theta: Vector, mean: Mean | None) -> Vector:
        """Return the parameters to continue with; `theta` is the current one."""
        offered, self._offered = self._offered, None
        if offered is None:
            raise ValueError("take must be called after offer")
        taken = damped(offered, self.strategy.take(offered, mean), self._damping)
        return taken + (theta - offered)
