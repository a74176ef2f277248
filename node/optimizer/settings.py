"""A training run's settings and statistics, and the names of tensors."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from gossip.averaging.catalogue import OUTER, TAKEN_IN_PART
from node.averaging.rounds import Round


@dataclass(frozen=True)
class Settings:
    """The settings of a run. Exactly one of `target_batch_size` (samples) and `local_steps` is given.

    `codec`: how values are sent: float32, bfloat16, float16, int8, int4. `weighting`: by samples, or equal
    for all. `window_seconds`: how long a round waits for peers that are not ready. `round_seconds_max`: how
    long a step waits for a round. `batch_size`: the number of samples in each `backward` of this peer,
    instead of the number from the loss's graph (`node.optimizer.samples`). `only_sends`: this peer has a slow
    uplink and reduces nothing for others. `clip_grad_norm`: limit for the norm of the mean gradient.

    `aggregate`: "mean", or a rule that tolerates some lying peers, such as "nnm-trimmed-mean". "auto" means
    that rule in a swarm without a key, and the mean in a swarm with a key (docs/averaging.md, "Rules").

    `admit` decides who takes part: "open", all peers that know the run's name; "invited", peers that its
    owner invited; "vouched", also peers that these invited. The owner is the peer without an `invitation`
    (`node.api.surface.Surface.invite`). With "invited" or "vouched", "auto" means the mean.

    With local steps, `strategy` defines the effect of a round: average, gossip (in pairs), diloco, noloco,
    sparseloco, asynchronous, or a user's own (`node.optimizer.plugins`). `average_moments` also averages the
    optimizer's moments, which strategies with outer steps leave alone. `damping`: the share of a round's mean
    that this peer takes, w <- (1 - damping) w + damping mean. A round that the script requests itself
    ignores it. `damping` may differ between peers.

    `own_loss` returns the loss of the present model on fixed data of this peer's own. It is called before and
    after another peer's state is put in place, without gradients, and must change nothing. A state is refused
    if its loss is not finite, or worse than `node.averaging.loss_bound.loss_max`.
    """

    run_id: str
    target_batch_size: int | None = None
    local_steps: int | None = None
    codec: str = "float32"
    weighting: Literal["samples", "equal"] = "samples"
    batch_size: int | None = None
    window_seconds: float = 5.0
    round_seconds_max: float = 60.0
    group_size_max: int = 64
    only_sends: bool = False
    clip_grad_norm: float | None = None
    strategy: str = "average"
    average_moments: bool = False
    damping: float = 1.0
    aggregate: str = "auto"
    admit: str = "open"
    invitation: str = field(default="", repr=False)
    own_loss: Callable[[], float] | None = None

    def __post_init__(self) -> None:
        if (self.target_batch_size is None) == (self.local_steps is None):
            raise ValueError("give either target_batch_size= (gradients) or local_steps= (tensors)")
        if min(self.target_batch_size or 1, self.local_steps or 1, self.batch_size or 1) < 1:
            raise ValueError("target_batch_size, local_steps and batch_size are at least 1")
        if self.local_steps is None and (self.strategy != "average" or self.average_moments):
            raise ValueError("strategy= and average_moments= are for local_steps=")
        if self.average_moments and self.strategy in OUTER:
            raise ValueError(f"{self.strategy} makes outer steps of parameters alone: average_moments=False")
        if not 0 < self.damping <= 1:
            raise ValueError(f"damping={self.damping}: above 0, and 1 at most")
        if self.damping < 1 and self.local_steps is None:
            raise ValueError("damping= is for local_steps=: with a target batch all make the same step")
        if self.damping < 1 and self.strategy not in TAKEN_IN_PART:
            raise ValueError(
                f"damping= is for strategy {', '.join(TAKEN_IN_PART)}: {self.strategy} says by itself what"
                " comes of a round"
            )
        if self.group_size_max < 2 or not self.run_id:
            raise ValueError("a run has a name, and a group two members at least")


@dataclass(frozen=True)
class Stats:
    """This peer's position and statistics. Times are in seconds and cover only this process.

    `samples` were gathered here for the next global step; `step_samples` are those of the latest call of
    `step`. `total_samples` were gathered by all peers at the same step. `last_round` is the newest finished
    round here, and `last_error` says why it averaged nothing. `blocked_seconds`: how long `step` has worked
    or waited for the run, in addition to the wrapped optimizer. `waited_seconds`: the part of it spent
    waiting for peers that were not ready.
    """

    global_step: int = 0
    peers: int = 0
    samples: int = 0
    step_samples: int = 0
    total_samples: int = 0
    rounds: int = 0
    rounds_failed: int = 0
    rounds_skipped: int = 0
    states_loaded: int = 0
    states_refused: int = 0
    samples_dropped: int = 0
    blocked_seconds: float = 0.0
    waited_seconds: float = 0.0
    last_round: Round | None = None
    last_error: str = ""


def names_of(
    optimizers: Iterable[torch.optim.Optimizer], model: torch.nn.Module | None, *, is_thawed: bool = False
) -> list[tuple[str, torch.Tensor]]:
    """Return the trained parameters in the order of their groups, named as in the model or by numbers. If
    `is_thawed`, include frozen ones."""
    known: Mapping[int, str] = (
        {} if model is None else {id(parameter): name for name, parameter in model.named_parameters()}
    )
    found: list[tuple[str, torch.Tensor]] = []
    seen: set[int] = set()
    for number, inner in enumerate(optimizers):
        for at, group in enumerate(inner.param_groups):
            for place, parameter in enumerate(group["params"]):
                if id(parameter) in seen:
                    raise ValueError("two of the optimizers train the same parameter")
                seen.add(id(parameter))
                if parameter.requires_grad or is_thawed:
                    found.append((known.get(id(parameter), f"{number}.{at}.{place}"), parameter))
    return found
