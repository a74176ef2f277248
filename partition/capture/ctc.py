"""Connectionist temporal classification (Graves et al. 2006) with operators that a graph may contain.

`torch.export` cannot trace `torch.ctc_loss`, whose internal results have sizes that depend on the labels.
This replaces it while a model is traced: it is the forward recursion of section 4.1 over all positions of the
input, in logarithms. It has the same gradient after a log_softmax; the proof compares the two.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from partition.capture.errors import CaptureRefused

_NEVER = -1e30
"""The logarithm of zero probability: finite, so that its gradient is finite."""
_MEAN, _SUM = 1, 2
PLACES_MAX = 512
"""Maximum length of the input: each position takes about a dozen operators of the graph."""


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: int = _MEAN,
    zero_infinity: bool = False,
) -> Tensor:
    """Return the same as `torch.ctc_loss`: `log_probs` (positions, batch, classes), `targets` (batch,
    length).

    Raises:
        CaptureRefused: the labels are not padded, there is no batch, or there are too many positions.
    """
    if log_probs.dim() != 3 or targets.dim() != 2:
        raise CaptureRefused(
            "ctc_loss with concatenated labels, or without a batch: pad the labels to "
            "(batch, length), and pass (places, batch, classes)"
        )
    places = int(log_probs.shape[0])
    if places > PLACES_MAX:
        raise CaptureRefused(
            f"ctc_loss over {places} places, but at most {PLACES_MAX} are "
            "allowed, because each is a separate step"
        )
    batch, length = targets.shape
    input_sizes, target_sizes = torch.as_tensor(input_lengths), torch.as_tensor(target_lengths)
    # The padding may have any value, such as -100.
    targets = torch.where(torch.arange(length) < target_sizes.unsqueeze(1), targets, blank)
    # Blank, label, blank, ..., label, blank.
    blanks = torch.full_like(targets, blank)
    between = torch.stack((blanks, targets), 2).reshape(batch, 2 * length)
    states = torch.cat((between, blanks[:, :1]), 1) if length else targets.new_full((batch, 1), blank)
    earlier = functional.pad(states, (2, 0), value=blank)[:, : 2 * length + 1]
    may_skip = (states != blank) & (states != earlier)
    said = log_probs.gather(2, states.unsqueeze(0).expand(places, batch, 2 * length + 1))
    is_first = torch.arange(2 * length + 1) < 2
    alpha = torch.where(is_first, said[0], _NEVER)
    for place in range(1, places):
        before = functional.pad(alpha, (2, 0), value=_NEVER)
        skipped = torch.where(may_skip, before[:, :-2], _NEVER)
        ways = torch.stack((alpha, before[:, 1:-1], skipped), 2)
        following = torch.logsumexp(ways, 2) + said[place]
        alpha = torch.where((input_sizes > place).unsqueeze(1), following, alpha)
    last = 2 * target_sizes.to(torch.int64).unsqueeze(1)
    ends = torch.cat((alpha.gather(1, last), alpha.gather(1, (last - 1).clamp_min(0))), 1)
    # Without labels there is one way to end instead of two.
    ends = torch.stack((ends[:, 0], torch.where(target_sizes > 0, ends[:, 1], _NEVER)), 1)
    losses = -torch.logsumexp(ends, 1)
    never = 0.0 if zero_infinity else float("inf")
    losses = torch.where(losses > -_NEVER / 2, never, losses)
    if reduction == _MEAN:
        return (losses / target_sizes.clamp_min(1).to(losses.dtype)).mean()
    return losses.sum() if reduction == _SUM else losses


@contextmanager
def traceable() -> Iterator[None]:
    """Replace torch's own function while the context lasts."""
    place: Any = torch
    kept = place.ctc_loss
    place.ctc_loss = ctc_loss
    try:
        yield
    finally:
        place.ctc_loss = kept
