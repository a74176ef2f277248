"""The choice of the next token: greedy, or drawn from the logits with temperature, top-k, top-p and min-p.

The door (the node that asks) samples, so sampling and its seed survive the death of a stage. The token at a
position follows from the seed, the position, the logits and, with penalties, the earlier tokens. The door
keeps all of these, so after a failover the same logits give the same token. Penalties and biases are applied
first, as in OpenAI's API. Then forbidden tokens are removed. The filters follow in the order of
`transformers` (temperature, top-k, top-p, min-p), each applied to the remaining tokens. Among equal logits
the lowest id comes first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
import numpy as np
from blake3 import blake3

from crypto.errors import RemoteProtocolError
from partition.codecs.base import Array
from partition.codecs.codec import Typed
from partition.serve.messages import BEST_MAX, Answer, UnitWork
from partition.serve.selection import best_logits, find_drawn

SEED_MAX = 2**63 - 1
TOP_K_MAX = 1 << 24
TEMPERATURE_MAX = 100.0
PENALTY_MAX = 2.0
"""Maximum penalty, as in OpenAI's API. A penalty of 2 subtracts 2 from a logit."""
BIAS_MAX = 100.0
"""Maximum bias, as in OpenAI's API. It bans a token, or leaves no other one."""
BIASES_MAX = 1_024
REPETITION_MAX = 10.0
"""Maximum repetition penalty. A logit is divided by it, as in `transformers`; a larger value would suppress
tokens completely."""
TOP_MAX = 20
"""Maximum number of likeliest tokens that are reported in addition to the chosen one."""
_DRAW_BITS = 53
"""The number of bits of a float64 between 0 and 1."""

Penalty = Annotated[float, msgspec.Meta(ge=-PENALTY_MAX, le=PENALTY_MAX)]
Bias = tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[float, msgspec.Meta(ge=-BIAS_MAX, le=BIAS_MAX)]]
"""A token, and the value that is added to its logit."""


class Sampling(msgspec.Struct, frozen=True):
    """The settings for choosing tokens. With `temperature` 0 the likeliest token is taken and the filters are
    ignored. `top_k` 0, `top_p` 1 and `min_p` 0 leave all tokens. `biases` are added to logits.
    `frequency_penalty` is subtracted once for each time that a token occurs in the answer, `presence_penalty`
    once if it occurs at all. `repetition_penalty` also covers the tokens of the prompt: it divides their
    logits if these are positive, and multiplies them otherwise. `top` is the number of likeliest tokens to
    report with each token."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=TEMPERATURE_MAX)] = 0.0
    top_k: Annotated[int, msgspec.Meta(ge=0, le=TOP_K_MAX)] = 0
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    seed: Annotated[int, msgspec.Meta(ge=0, le=SEED_MAX)] = 0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    biases: Annotated[tuple[Bias, ...], msgspec.Meta(max_length=BIASES_MAX)] = ()
    top: Annotated[int, msgspec.Meta(ge=0, le=TOP_MAX)] = 0
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=REPETITION_MAX)] = 1.0

    @property
    def is_plain(self) -> bool:
        """Whether logits are used as the model gives them."""
        penalties = self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1
        return not (penalties or self.biases)

    @property
    def best(self) -> int:
        """How many of the largest logits of a row are needed; 0 for all of them."""
        if not self.is_plain:
            return 0
        if self.temperature == 0:
            return max(1, self.top)
        return max(self.top_k, self.top) if 0 < self.top_k <= BEST_MAX else 0


def log_sum(row: Array) -> float:
    """Return the logarithm of the sum of a row's exponentials, in float64."""
    wide = row.astype(np.float64)
    largest = float(wide.max())
    return largest + float(np.log(np.exp(wide - largest).sum()))


@dataclass(frozen=True)
class LogitRow:
    """The logits of one position, and the logarithm of the sum of all their exponentials. With `ids`, these
    are the largest logits of the row, in descending order; without, they are all logits in the order of the
    vocabulary."""

    logits: Array
    total: float = 0.0
    ids: Array | None = None

    def logprob(self, token: int) -> float:
        """Return the logarithm of a token's probability according to the model."""
        place = token if self.ids is None else int(np.flatnonzero(self.ids == token)[0])
        return float(self.logits[place]) - self.total

    def likeliest(self, count: int) -> tuple[tuple[int, float], ...]:
        """Return the likeliest tokens, at most `count`, with the logarithms of their probabilities."""
        if not count:
            return ()
        ids, logits = best_logits(self.logits, count) if self.ids is None else (self.ids, self.logits)
        return tuple(
            (int(token), float(logit) - self.total)
            for token, logit in zip(ids[:count], logits[:count], strict=True)
        )


def choose(
    row: LogitRow,
    sampling: Sampling,
    position: int,
    made: Sequence[int] = (),
    *,
    prompt: Sequence[int] = (),
    allowed: Array | None = None,
) -> int:
    """Return the token at `position`. `row` is complete, or has at least the `sampling.best` largest logits;
    they are finite. `made` are the answer's earlier tokens. Only tokens that are `allowed` (a boolean for
    each token) are chosen; there must be at least one."""
    ids, logits = row.ids, row.logits
    if ids is not None:
        if allowed is not None:
            kept = allowed[ids]
            ids, logits = ids[kept], logits[kept]
        return _choose_sorted(ids, logits, sampling, position)
    if not sampling.is_plain:
        logits = _adjusted(logits, sampling, made, prompt)
    if allowed is not None:
        ids = np.flatnonzero(allowed)
        logits = logits[ids]
    place = _choose_place(logits, sampling, position)
    return place if ids is None else int(ids[place])


def _choose_place(logits: Array, sampling: Sampling, position: int) -> int:
    """Return the index of the chosen logit, for logits in any order. Among equal logits the first
    precedes the others.

    Sorting 150,000 logits would block the event loop for 50 ms for each token."""
    if sampling.temperature == 0:
        return int(np.argmax(logits))
    if sampling.top_k:
        return _choose_sorted(*best_logits(logits, sampling.top_k), sampling, position)
    number = draw(sampling.seed, position)
    place = find_drawn(logits, sampling.temperature, sampling.top_p, sampling.min_p, number)
    if place is not None:
        return place
    order = np.argsort(-logits.astype(np.float64), kind="stable")
    return _choose_sorted(order, logits[order], sampling, position)


def _choose_sorted(ids: Array, logits: Array, sampling: Sampling, position: int) -> int:
    """Return the chosen one of `ids`, which are in descending order of their logits."""
    if sampling.temperature == 0:
        return int(ids[0])
    if sampling.top_k:
        ids, logits = ids[: sampling.top_k], logits[: sampling.top_k]
    # A provider may send the largest numbers, and a user may set the smallest temperature.
    with np.errstate(over="ignore", invalid="ignore"):
        wide = logits.astype(np.float64)
        # Subtract before dividing: quotients may be infinite, and then have no difference.
        shares = np.exp((wide - wide[0]) / sampling.temperature)
        shares /= shares.sum()
    if sampling.top_p < 1:
        # The token at which the sum reaches top_p still belongs to the chosen ones.
        shares = shares[: int(np.searchsorted(np.cumsum(shares), sampling.top_p)) + 1]
    if sampling.min_p > 0:
        shares = shares[shares >= sampling.min_p * shares[0]]
    ends = np.cumsum(shares)
    place = int(np.searchsorted(ends, draw(sampling.seed, position) * ends[-1], side="right"))
    return int(ids[min(place, len(ends) - 1)])


def _adjusted(logits: Array, sampling: Sampling, made: Sequence[int], prompt: Sequence[int]) -> Array:
    """Return a complete row of logits after biases and penalties."""
    row = logits.astype(np.float64)
    if sampling.repetition_penalty != 1:
        again = np.unique(np.asarray([*prompt, *made], np.int64))
        scores, penalty = row[again], sampling.repetition_penalty
        row[again] = np.where(scores > 0, scores / penalty, scores * penalty)
    for token, bias in sampling.biases:
        if token < len(row):
            row[token] += bias
    seen, counts = np.unique(np.asarray(made, np.int64), return_counts=True)
    row[seen] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    return row


def draw(seed: int, position: int) -> float:
    """Return a number in [0, 1) that follows from a seed and a position."""
    digest = blake3(b"peerloom sample" + seed.to_bytes(8) + position.to_bytes(8)).digest(8)
    return (int.from_bytes(digest) >> (64 - _DRAW_BITS)) / (1 << _DRAW_BITS)


def read_hidden(work: UnitWork, answer: Answer, tensors: Sequence[Typed], width: int) -> Array:
    """Return the hidden states of a unit, one row for each of its tokens. Raises RemoteProtocolError if they
    differ from the request."""
    arrays = [array for _, array in tensors]
    if answer.best or answer.sums or len(arrays) != 1 or arrays[0].shape != (work.tokens, width):
        raise RemoteProtocolError(
            f"the answer does not have the requested {work.tokens} rows of {width} values"
        )
    if arrays[0].dtype.kind != "f" or not np.isfinite(arrays[0]).all():
        raise RemoteProtocolError("the answer has hidden states that are not finite")
    return arrays[0]


def read_row(work: UnitWork, answer: Answer, tensors: Sequence[Typed], vocabulary: int) -> LogitRow | None:
    """Return the row that a unit asks for; None if it asks for none. Raises RemoteProtocolError if the answer
    differs from the request."""
    arrays = [array for _, array in tensors]
    if not work.wanted:
        if arrays or answer.sums:
            raise RemoteProtocolError("the answer has logits that were not requested")
        return None
    if answer.best != work.best or len(answer.sums) != 1 or not np.isfinite(answer.sums[0]):
        raise RemoteProtocolError("the answer does not have the requested form")
    count = min(work.best, vocabulary) or vocabulary
    if len(arrays) != (2 if work.best else 1) or any(array.size != count for array in arrays):
        raise RemoteProtocolError(f"the answer does not have the requested {count} logits")
    logits = arrays[-1].reshape(-1)
    if logits.dtype.kind != "f" or not np.isfinite(logits).all():
        raise RemoteProtocolError("the answer has logits that are not finite")
    if not work.best:
        return LogitRow(logits, answer.sums[0])
    ids = arrays[0].reshape(-1)
    if ids.dtype != np.int64 or ids.min() < 0 or ids.max() >= vocabulary or len(set(ids.tolist())) < count:
        raise RemoteProtocolError("the answer has an id that is not a token of the model, or an id twice")
    if (np.diff(logits.astype(np.float64)) > 0).any():
        raise RemoteProtocolError("the answer has logits that are not in descending order")
    return LogitRow(logits, answer.sums[0], ids)
