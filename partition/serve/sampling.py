"""Which token comes next: greedy, or drawn from the logits by temperature, top-k, top-p and min-p.

The door samples, so sampling and its seed survive the death of a stage. What is drawn at a position follows
from the seed, the position, the logits and, with penalties, the tokens before it, all of which the door
keeps: after a failover the same logits give the same token. Penalties and biases come first, as in OpenAI's
API, then what is not allowed is left out, then the filters in the order of `transformers` (temperature,
top-k, top-p, min-p), each over what the one before left. Of equal logits the lowest id comes first.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
from blake3 import blake3

from crypto.errors import RemoteProtocolError
from partition.codecs.base import Array
from partition.codecs.codec import Typed
from partition.serve.messages import BEST_MAX, Answer, Work

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
"""What a float64 between 0 and 1 holds."""

Penalty = Annotated[float, msgspec.Meta(ge=-PENALTY_MAX, le=PENALTY_MAX)]
Bias = tuple[Annotated[int, msgspec.Meta(ge=0)], Annotated[float, msgspec.Meta(ge=-BIAS_MAX, le=BIAS_MAX)]]
"""A token, and what is added to its logit."""


class Sampling(msgspec.Struct, frozen=True):
    """How tokens are chosen. `temperature` 0 takes the likeliest, whatever the filters say. `top_k` 0,
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


def best_logits(row: Array, count: int) -> tuple[Array, Array]:
    """Return the ids and values of the `count` largest logits, the largest first; of equal ones the lowest id
    is the larger."""
    count = min(count, len(row))
    if count == 1:
        first = int(np.argmax(row))
        return np.array([first], np.int64), row[first : first + 1]
    edge = np.partition(row, len(row) - count)[len(row) - count]
    above, at = np.flatnonzero(row > edge), np.flatnonzero(row == edge)
    ids = np.concatenate([above, at[: count - len(above)]])
    ids = ids[np.lexsort((ids, -row[ids].astype(np.float64)))]
    return ids.astype(np.int64), row[ids]


def log_sum(row: Array) -> float:
    """Return the logarithm of the sum of exponentials of a row, in float64."""
    wide = row.astype(np.float64)
    largest = float(wide.max())
    return largest + float(np.log(np.exp(wide - largest).sum()))


def choose(
    ids: Array,
    logits: Array,
    sampling: Sampling,
    position: int,
    made: Sequence[int] = (),
    *,
    prompt: Sequence[int] = (),
    allowed: Array | None = None,
) -> int:
    """Return the token at `position`. `logits` are finite, the largest first, `ids` the tokens they are of:
    all of the row, or at least the `sampling.best` largest. `made` are the answer's tokens before it. Of all
    tokens those may come that are `allowed` (a boolean each), of which there is one at least."""
    if not sampling.is_plain:
        ids, logits = _adjusted(ids, logits, sampling, made, prompt)
    if allowed is not None:
        kept = allowed[ids]
        ids, logits = ids[kept], logits[kept]
    if sampling.temperature == 0:
        return int(ids[0])
    if sampling.top_k:
        ids, logits = ids[: sampling.top_k], logits[: sampling.top_k]
    scaled = logits.astype(np.float64) / sampling.temperature
    shares = np.exp(scaled - scaled[0])
    shares /= shares.sum()
    if sampling.top_p < 1:
        # The first token that reaches the sum belongs to it.
        shares = shares[: int(np.searchsorted(np.cumsum(shares), sampling.top_p)) + 1]
    if sampling.min_p > 0:
        shares = shares[shares >= sampling.min_p * shares[0]]
    ends = np.cumsum(shares)
    place = int(np.searchsorted(ends, draw(sampling.seed, position) * ends[-1], side="right"))
    return int(ids[min(place, len(ends) - 1)])


def _adjusted(
    ids: Array, logits: Array, sampling: Sampling, made: Sequence[int], prompt: Sequence[int]
) -> tuple[Array, Array]:
    """Return a whole row with its biases and penalties, the largest first."""
    row = np.empty(len(ids))
    row[ids] = logits
    if sampling.repetition_penalty != 1:
        again = np.unique(np.asarray([*prompt, *made], np.int64))
        scores, penalty = row[again], sampling.repetition_penalty
        row[again] = np.where(scores > 0, scores / penalty, scores * penalty)
    for token, bias in sampling.biases:
        if token < len(row):
            row[token] += bias
    seen, counts = np.unique(np.asarray(made, np.int64), return_counts=True)
    row[seen] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    order = np.argsort(-row, kind="stable")
    return order, row[order]


def draw(seed: int, position: int) -> float:
    """Return a number from 0 to below 1 that follows from a seed and a position."""
    digest = blake3(b"peerloom sample" + seed.to_bytes(8) + position.to_bytes(8)).digest(8)
    return (int.from_bytes(digest) >> (64 - _DRAW_BITS)) / (1 << _DRAW_BITS)


def read_row(
    work: Work, answer: Answer, tensors: Sequence[Typed], vocabulary: int
) -> tuple[Array, Array, float]:
    """Return the ids and logits of the one row that a unit wants, the largest first, and their log-sum;
    nothing where it wants none. Raises RemoteProtocolError: it is not what was wanted."""
    arrays = [array for _, array in tensors]
    if not work.wanted:
        if arrays or answer.sums:
            raise RemoteProtocolError("logits that nobody wanted")
        return np.empty(0, np.int64), np.empty(0), 0.0
    if answer.best != work.best or len(answer.sums) != 1 or not np.isfinite(answer.sums[0]):
        raise RemoteProtocolError("an answer of another form than was wanted")
    count = min(work.best, vocabulary) or vocabulary
    if len(arrays) != (2 if work.best else 1) or any(array.size != count for array in arrays):
        raise RemoteProtocolError(f"not the {count} logits that were wanted")
    logits = arrays[-1].reshape(-1)
    if logits.dtype.kind != "f" or not np.isfinite(logits).all():
        raise RemoteProtocolError("logits that are no finite numbers")
    if not work.best:
        order = np.argsort(-logits.astype(np.float64), kind="stable")
        return order, logits[order], answer.sums[0]
    ids = arrays[0].reshape(-1)
    if ids.dtype != np.int64 or ids.min() < 0 or ids.max() >= vocabulary or len(set(ids.tolist())) < count:
        raise RemoteProtocolError("ids that are no tokens of the model, or one twice")
    if (np.diff(logits.astype(np.float64)) > 0).any():
        raise RemoteProtocolError("logits that are not in their order")
    return ids, logits, answer.sums[0]
