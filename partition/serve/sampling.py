"""Chooses the next token: greedy, or drawn from the logits by temperature, top-k, top-p and min-p.

The door samples, so sampling and its seed survive the death of a stage. The token at a position follows from
the seed, the position, the logits and, with penalties, the tokens before it, all of which the door keeps:
after a failover the same logits give the same token. Penalties and biases come first, as in OpenAI's API,
then forbidden tokens are removed, then come the filters in the order of `transformers` (temperature, top-k,
top-p, min-p), each over the remaining tokens. Among equal logits the lowest id comes first.
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
"""As in OpenAI's API: a penalty of 2 is 2 off a logit."""
BIAS_MAX = 100.0
"""As there: it bans a token, or leaves no other."""
BIASES_MAX = 1_024
REPETITION_MAX = 10.0
"""A logit is divided by it, as transformers does it; more leaves nothing of a token."""
TOP_MAX = 20
"""Likeliest tokens that are told beside the one that was chosen."""
_DRAW_BITS = 53
"""The bits of a float64 between 0 and 1."""

Penalty = Annotated[float, msgspec.Meta(ge=-PENALTY_MAX, le=PENALTY_MAX)]
Bias = tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[float, msgspec.Meta(ge=-BIAS_MAX, le=BIAS_MAX)]]
"""A token, and what is added to its logit."""


class Sampling(msgspec.Struct, frozen=True):
    """How tokens are chosen. `temperature` 0 takes the likeliest token and ignores the filters. `top_k` 0,
    `top_p` 1 and `min_p` 0 leave all tokens. `biases` are added to logits; `frequency_penalty` is taken off
    for each time that a token stands in the answer, `presence_penalty` once; `repetition_penalty` divides the
    logits of tokens of the prompt too where they are positive, else it multiplies them. `top` of the
    likeliest are told with each token."""

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
        """Whether logits are taken as the model gives them."""
        penalties = self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1
        return not (penalties or self.biases)

    @property
    def best(self) -> int:
        """How many of the best logits of a row decide; 0: all of them."""
        if not self.is_plain:
            return 0
        if self.temperature == 0:
            return max(1, self.top)
        return max(self.top_k, self.top) if 0 < self.top_k <= BEST_MAX else 0


def log_sum(row: Array) -> float:
    """Return the logarithm of the sum of exponentials of a row, in float64."""
    wide = row.astype(np.float64)
    largest = float(wide.max())
    return largest + float(np.log(np.exp(wide - largest).sum()))


@dataclass(frozen=True)
class LogitRow:
    """The logits of one position, and the logarithm of the sum of all their exponentials. With `ids` they are
    the best of the row, the largest first; without, all of them in the order of the vocabulary."""

    logits: Array
    total: float = 0.0
    ids: Array | None = None

    def logprob(self, token: int) -> float:
        """Return the logarithm of a token's probability by the model."""
        place = token if self.ids is None else int(np.flatnonzero(self.ids == token)[0])
        return float(self.logits[place]) - self.total

    def likeliest(self, count: int) -> tuple[tuple[int, float], ...]:
        """Return the likeliest tokens, at most `count`, with their logprobs."""
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
    """Return the token at `position`. `row` is whole, or has at least the `sampling.best` largest logits;
    they are finite. `made` are the answer's tokens before it. Only tokens that are `allowed` (a boolean
    each) may come; there is at least one."""
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
    """Return the place of the chosen one of all logits, in any order; of equal ones the first counts more.

    Sorting 150,000 of them would take 50 ms of the event loop for each token."""
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
    """Return the chosen one of `ids`, which begin with the largest logit."""
    if sampling.temperature == 0:
        return int(ids[0])
    if sampling.top_k:
        ids, logits = ids[: sampling.top_k], logits[: sampling.top_k]
    # A provider may send the largest numbers, and a person the smallest temperature.
    with np.errstate(over="ignore", invalid="ignore"):
        wide = logits.astype(np.float64)
        # The difference comes first: infinite quotients have none.
        shares = np.exp((wide - wide[0]) / sampling.temperature)
        shares /= shares.sum()
    if sampling.top_p < 1:
        # The first token that reaches the sum belongs to it.
        shares = shares[: int(np.searchsorted(np.cumsum(shares), sampling.top_p)) + 1]
    if sampling.min_p > 0:
        shares = shares[shares >= sampling.min_p * shares[0]]
    ends = np.cumsum(shares)
    place = int(np.searchsorted(ends, draw(sampling.seed, position) * ends[-1], side="right"))
    return int(ids[min(place, len(ends) - 1)])


def _adjusted(logits: Array, sampling: Sampling, made: Sequence[int], prompt: Sequence[int]) -> Array:
    """Return a whole row with its biases and penalties."""
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
    """Return a number from 0 to below 1 that follows from a seed and a position."""
    digest = blake3(b"peerloom sample" + seed.to_bytes(8) + position.to_bytes(8)).digest(8)
    return (int.from_bytes(digest) >> (64 - _DRAW_BITS)) / (1 << _DRAW_BITS)


def read_hidden(work: UnitWork, answer: Answer, tensors: Sequence[Typed], width: int) -> Array:
    """Return the hidden states of a unit, a row for each of its tokens. Raises RemoteProtocolError: they
    differ from the request."""
    arrays = [array for _, array in tensors]
    if answer.best or answer.sums or len(arrays) != 1 or arrays[0].shape != (work.tokens, width):
        raise RemoteProtocolError(f"not the {work.tokens} rows of {width} numbers that were wanted")
    if arrays[0].dtype.kind != "f" or not np.isfinite(arrays[0]).all():
        raise RemoteProtocolError("hidden states that are no finite numbers")
    return arrays[0]


def read_row(work: UnitWork, answer: Answer, tensors: Sequence[Typed], vocabulary: int) -> LogitRow | None:
    """Return the one row that a unit wants; None if it wants none. Raises RemoteProtocolError: it differs
    from the request."""
    arrays = [array for _, array in tensors]
    if not work.wanted:
        if arrays or answer.sums:
            raise RemoteProtocolError("logits that nobody wanted")
        return None
    if answer.best != work.best or len(answer.sums) != 1 or not np.isfinite(answer.sums[0]):
        raise RemoteProtocolError("an answer of another form than was wanted")
    count = min(work.best, vocabulary) or vocabulary
    if len(arrays) != (2 if work.best else 1) or any(array.size != count for array in arrays):
        raise RemoteProtocolError(f"not the {count} logits that were wanted")
    logits = arrays[-1].reshape(-1)
    if logits.dtype.kind != "f" or not np.isfinite(logits).all():
        raise RemoteProtocolError("logits that are no finite numbers")
    if not work.best:
        return LogitRow(logits, answer.sums[0])
    ids = arrays[0].reshape(-1)
    if ids.dtype != np.int64 or ids.min() < 0 or ids.max() >= vocabulary or len(set(ids.tolist())) < count:
        raise RemoteProtocolError("ids that are no tokens of the model, or one twice")
    if (np.diff(logits.astype(np.float64)) > 0).any():
        raise RemoteProtocolError("logits that are not in their order")
    return LogitRow(logits, answer.sums[0], ids)
