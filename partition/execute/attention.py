"""`attend`: causal attention of many sessions over pages of keys and values, as one operator of a graph.

    attend(q, k, v, layer, scale, window=0, softcap=0., sinks=None) -> Tensor

q is [1, heads, tokens, width], k and v are [1, heads of keys, tokens, width]. The result has the shape of q,
but the width of v. The tokens are those of all units of a batch, flat. Their sessions and positions are not
in the graph: `serving` sets them for one run. So one graph serves prompts, parts of prompts, single tokens,
and mixtures of these, and contains no cache and no mask.

`window` hides keys that are at least this many tokens back (0: none). With WHOLE a row sees all tokens of its
session, including later ones: encoders attend this way, with each text in one unit. `softcap` bounds scores
by its tanh (0: none). `sinks` are scores, one per head, that take a share of the softmax and contribute no
value (gpt-oss).

A row's bits do not depend on other rows of the batch, nor on how its session was divided into units. Keys are
taken in blocks, one per page; the rows of every product are padded to a multiple of ROWS; and the results of
the blocks are added one after the other. So hidden keys and blocks add exact zeros. This holds for torch's
plain products (`tests/partition/test_serving_exactness.py` tests it), but not for its attention kernels.

Half-precision keys and values are stored as such; scores, weights and sums are float32, and the result is
rounded once.

Outside `serving` it is plain causal attention of sequences [batch, heads, tokens, width], so that a model can
be captured, and a graph compared with its model.
"""

# ruff: noqa: N803, N806 - shapes stand in names

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from math import inf
from typing import Any

import torch

from partition.execute.pages import PAGE_TOKENS, Pages, UnitSpan
from partition.model.operators import WHOLE_WINDOW

ROWS = 4
"""Rows of a batched product are a multiple of this: from four on, torch's kernels compute each row the same
way."""
WHOLE = WHOLE_WINDOW
SCRATCH_BYTES = 32 << 20
"""Maximum memory of one batched product for scores and gathered keys, unless a single row needs more."""

STRETCHES_MAX = 6
"""Maximum number of copies for which copying one by one is faster than by index."""

_library = torch.library.Library("peerloom", "DEF")  # type: ignore[no-untyped-call]  # of torch
_library.define(  # type: ignore[no-untyped-call]  # of torch
    "attend(Tensor q, Tensor k, Tensor v, int layer, float scale, int window=0, float softcap=0., "
    "Tensor? sinks=None) -> Tensor"
)


@dataclass(frozen=True)
class _Group:
    """Rows of sessions, equally many per session, with their blocks. Blocks are ordered by turn: the first
    block of all sessions, then the second block of those that have one, and so on. Sessions with more blocks
    come first.

    `turns` are (begin, end) of each turn's blocks, `member` is each block's session, `pages` its page; `run`
    is set if the pages are consecutive. `rows` are the tokens in the batch, [sessions * tokens]; if
    `is_together`, they are consecutive from `first` on. `hidden` marks the keys that a row does not see,
    [blocks, 1, 1, tokens, PAGE_TOKENS].
    """

    tokens: int
    rows: torch.Tensor
    first: int
    is_together: bool
    turns: tuple[tuple[int, int], ...]
    member: torch.Tensor
    pages: torch.Tensor
    run: tuple[int, int] | None
    hidden: torch.Tensor


@dataclass(frozen=True)
class _Stretch:
    """Tokens from `first` in the batch that are in one page, from `slot` on."""

    page: int
    slot: int
    first: int
    tokens: int


@dataclass
class Batch:
    """The units of one run, in the form that `attend` needs."""

    pages: Pages
    spans: tuple[UnitSpan, ...]
    _written: tuple[torch.Tensor, torch.Tensor] | list[_Stretch] | None = None
    _groups: dict[tuple[int, int, int], list[_Group]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        last = self.spans[-1]
        return last.first + last.tokens

    @cached_property
    def single(self) -> UnitSpan | None:
        """The span of the batch, if it is a single token and the pages of its session are consecutive from
        page 0; else None."""
        span = self.spans[0]
        pages = span.pages
        is_alone = len(self.spans) == 1 and span.tokens == 1
        return span if is_alone and pages == tuple(range(pages[0], pages[0] + len(pages))) else None

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write keys and values to the pages of their sessions."""
        if self._written is None:
            self._written = _places(self.spans, k.device)
        for pool, given in zip(self.pages.pool(layer), (k[0], v[0]), strict=True):
            if isinstance(self._written, list):
                for part in self._written:
                    target = pool[part.page].narrow(1, part.slot, part.tokens)
                    target.copy_(given.narrow(1, part.first, part.tokens))
            else:
                pages_T, slots_T = self._written
                pool[pages_T, :, slots_T] = given[:, : self.tokens].transpose(0, 1)

    def groups(self, window: int, block_bytes: int, row_bytes: int, device: torch.device) -> list[_Group]:
        """Return the groups in which to compute the batch. A block takes `block_bytes`, and `row_bytes` for
        each of its rows."""
        key = window, block_bytes, row_bytes
        if key not in self._groups:
            self._groups[key] = [
                _group(parts, window, device) for parts in _parts(self.spans, window, block_bytes, row_bytes)
            ]
        return self._groups[key]


@dataclass(frozen=True)
class _Part:
    """Some rows of a span: tokens from `first` in the batch, at `position` in their session."""

    first: int
    position: int
    tokens: int
    pages: tuple[int, ...]
    block: int
    end: int
    """The number of tokens of the session, including this unit."""


def _places(
    spans: Sequence[UnitSpan], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor] | list[_Stretch]:
    """Return where the tokens are stored: a few stretches, or for each token its page and slot."""
    stretches = []
    for span in spans:
        begin, end = span.position, span.position + span.tokens
        while begin < end:
            page, slot = divmod(begin, PAGE_TOKENS)
            count = min(end - begin, PAGE_TOKENS - slot)
            stretches.append(_Stretch(span.pages[page], slot, span.first + begin - span.position, count))
            begin += count
    if len(stretches) <= STRETCHES_MAX:
        return stretches
    pages = [each.page for each in stretches for _ in range(each.tokens)]
    slots = [each.slot + number for each in stretches for number in range(each.tokens)]
    return torch.tensor(pages, device=device), torch.tensor(slots, device=device)


_batch: list[Batch] = []


@contextmanager
def serving(batch: Batch) -> Iterator[None]:
    """Make `attend` serve this batch. Only one batch per process at a time."""
    _batch.append(batch)
    try:
        yield
    finally:
        _batch.pop()


def _parts(
    spans: Sequence[UnitSpan], window: int, block_bytes: int, row_bytes: int
) -> Iterator[Sequence[_Part]]:
    """Yield parts that are computed together: all single tokens, and longer spans a few rows at a time."""
    singles: list[_Part] = []
    size = 0
    for part in sorted(
        (_part(span, 0, 1, window) for span in spans if span.tokens == 1), key=lambda part: -len(part.pages)
    ):
        taken = len(part.pages) * (block_bytes + row_bytes)
        if singles and size + taken > SCRATCH_BYTES:
            yield singles
            singles, size = [], 0
        singles.append(part)
        size += taken
    if singles:
        yield singles
    for span in spans:
        begin = 0
        while span.tokens > 1 and begin < span.tokens:
            blocks = -(-(span.position + span.tokens) // PAGE_TOKENS)
            most = max(1, (SCRATCH_BYTES - blocks * block_bytes) // (blocks * row_bytes))
            count = min(span.tokens - begin, most)
            yield [_part(span, begin, count, window)]
            begin += count


def _part(span: UnitSpan, begin: int, count: int, window: int) -> _Part:
    position = span.position + begin
    first = max(0, position - window + 1) // PAGE_TOKENS if window > 0 else 0
    end = span.position + span.tokens
    last = -(-(end if window == WHOLE else position + count) // PAGE_TOKENS)
    return _Part(span.first + begin, position, count, span.pages[first:last], first, end)


def _group(parts: Sequence[_Part], window: int, device: torch.device) -> _Group:
    tokens = parts[0].tokens
    turns: list[tuple[int, int]] = []
    member: list[int] = []
    pages: list[int] = []
    keys: list[int] = []
    for turn in range(len(parts[0].pages)):
        begin = len(pages)
        for number, part in enumerate(parts):
            if turn >= len(part.pages):
                break
            member.append(number)
            pages.append(part.pages[turn])
            keys.append((part.block + turn) * PAGE_TOKENS)
        turns.append((begin, len(pages)))
    is_run = pages == list(range(pages[0], pages[0] + len(pages)))
    members = torch.tensor(member, device=device)
    begins = torch.tensor([part.position for part in parts], device=device)
    position_NT = begins[members, None] + torch.arange(tokens, device=device)
    key_NK = torch.tensor(keys, device=device)[:, None] + torch.arange(PAGE_TOKENS, device=device)
    distance_NTK = position_NT[:, :, None] - key_NK[:, None, :]
    hidden_NTK = distance_NTK < 0
    if window == WHOLE:
        ends = torch.tensor([part.end for part in parts], device=device)[members]
        hidden_NTK = (key_NK >= ends[:, None])[:, None, :].expand(-1, tokens, -1)
    elif window:
        hidden_NTK |= distance_NTK >= window
    rows = [part.first + number for part in parts for number in range(tokens)]
    return _Group(
        tokens,
        torch.tensor(rows, device=device),
        rows[0],
        rows == list(range(rows[0], rows[0] + len(rows))),
        tuple(turns),
        members,
        torch.tensor(pages, device=device),
        (pages[0], len(pages)) if is_run else None,
        hidden_NTK[:, None, None],
    )


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    if not _batch:
        return _plain(q, k, v, scale, window, softcap, sinks)
    batch = _batch[-1]
    batch.write(layer, k, v)
    keys, values = batch.pages.pool(layer)
    if batch.single is not None and not window and not softcap and sinks is None:
        return _single(q, keys, values, scale, batch.single)
    heads, key_heads = q.shape[1], k.shape[1]
    share = heads // key_heads
    work = _working(q.dtype)
    row = padded(share) * work.itemsize
    # Scores and weights of a row, and its result from one block.
    row_bytes = key_heads * row * (2 * PAGE_TOKENS + v.shape[3])
    block_bytes = key_heads * PAGE_TOKENS * (k.shape[3] + v.shape[3]) * work.itemsize
    out = _room(q, v.shape[3])
    scaled = q[0].to(work) * scale
    for group in batch.groups(window, block_bytes, row_bytes, q.device):
        sessions, tokens = group.turns[0][1], group.tokens
        given = scaled[:, group.first : group.first + sessions * tokens]
        if not group.is_together:
            given = scaled.index_select(1, group.rows)
        given = given.view(key_heads, share, sessions, tokens, q.shape[3]).permute(2, 0, 1, 3, 4)
        folded = _fold(given, keys, values, group, softcap, sinks).to(q.dtype)
        out[0].index_copy_(1, group.rows, folded.permute(1, 2, 0, 3, 4).reshape(heads, -1, v.shape[3]))
    return out


def _room(q: torch.Tensor, width: int) -> torch.Tensor:
    """Return zeros in the result's shape, with the memory layout that suits joining the heads."""
    return q.new_zeros(q.shape[0], q.shape[2], q.shape[1], width).transpose(1, 2)


def _single(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, span: UnitSpan
) -> torch.Tensor:
    """Compute one token of one session: bit for bit the result of `_fold`, with fewer calls."""
    heads, width, key_heads = q.shape[1], q.shape[3], keys.shape[1]
    share, work = heads // key_heads, _working(q.dtype)
    rows, count, seen = padded(share), len(span.pages), span.position % PAGE_TOKENS + 1
    given = q.new_zeros(key_heads, rows, width, dtype=work)
    given[:, :share].copy_(q[0, :, 0].reshape(key_heads, share, width)).mul_(scale)
    k = keys.narrow(0, span.pages[0], count).flatten(0, 1).to(work)
    v = values.narrow(0, span.pages[0], count).flatten(0, 1).to(work)
    scores = torch.bmm(given.expand(count, -1, -1, -1).reshape(-1, rows, width), k.transpose(1, 2))
    scores = scores.view(count, key_heads, rows, PAGE_TOKENS)
    if seen < PAGE_TOKENS:
        scores[-1].narrow(2, seen, PAGE_TOKENS - seen).fill_(-inf)
    weights = scores.sub_(scores.amax((0, 3), keepdim=True)).exp_()
    total, *sums = weights.sum(-1).unbind()
    parts = torch.bmm(weights.view(-1, rows, PAGE_TOKENS), v)
    whole, *others = parts.view(count, key_heads, rows, -1).unbind()
    for one, other in zip(sums, others, strict=True):
        total.add_(one)
        whole.add_(other)
    out = _room(q, values.shape[3])
    out[0, :, 0] = (whole[:, :share] / total[:, :share].unsqueeze(-1)).view(heads, -1)
    return out


def _fold(
    q_SHGTD: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    group: _Group,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute attention for the rows of a group, block by block.

    Shapes: S sessions, H heads of keys, G heads of queries that share one, T tokens, D width.
    """
    sessions, heads, share, tokens, width = q_SHGTD.shape
    rows = padded(share * tokens)
    if rows == share * tokens:
        q = q_SHGTD.reshape(sessions, heads, rows, width)
    else:
        q = q_SHGTD.new_zeros(sessions, heads, rows, width)
        q[:, :, : share * tokens].view(sessions, heads, share, tokens, width).copy_(q_SHGTD)
    blocks = len(group.member)
    if group.run is not None:
        begin, count = group.run
        k, v = keys[begin : begin + count], values[begin : begin + count]
    else:
        k, v = keys.index_select(0, group.pages), values.index_select(0, group.pages)
    k, v = k.to(q.dtype), v.to(q.dtype)
    spread = q.expand(blocks, -1, -1, -1) if sessions == 1 else q.index_select(0, group.member)
    scores = torch.bmm(spread.reshape(-1, rows, width), k.flatten(0, 1).transpose(1, 2))
    if softcap:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores = scores.view(blocks, heads, rows, PAGE_TOKENS)
    seen = scores[:, :, : share * tokens].view(blocks, heads, share, tokens, PAGE_TOKENS)
    seen.masked_fill_(group.hidden, -inf)
    most = _most(scores.amax(-1), group)
    if sinks is not None:
        sink = sinks.view(heads, share, 1).expand(heads, share, tokens).reshape(heads, -1)
        most[:, :, : share * tokens] = torch.maximum(most[:, :, : share * tokens], sink)
    spread_most = most if sessions == 1 else most.index_select(0, group.member)
    weights = scores.sub_(spread_most.unsqueeze(-1)).exp_()
    sums = weights.sum(-1)
    parts = torch.bmm(weights.flatten(0, 1), v.flatten(0, 1)).view(blocks, heads, rows, -1)
    total, whole = _added(sums, group), _added(parts, group)
    if sinks is not None:
        total[:, :, : share * tokens] += torch.exp(sink - most[:, :, : share * tokens])
    found = whole[:, :, : share * tokens] / total[:, :, : share * tokens].unsqueeze(-1)
    return found.view(sessions, heads, share, tokens, -1)


def _added(parts: torch.Tensor, group: _Group) -> torch.Tensor:
    """Add up the blocks of each session, one after the other."""
    first, *others = torch.split_with_sizes(parts, [end - begin for begin, end in group.turns])
    total = first.clone()
    for part in others:
        (total if len(part) == len(total) else total[: len(part)]).add_(part)
    return total


def _most(most: torch.Tensor, group: _Group) -> torch.Tensor:
    """Return the largest score of each row over its blocks; their order does not matter."""
    sessions = group.turns[0][1]
    if sessions == 1:
        return most.amax(0, keepdim=True)
    found = most[:sessions].clone()
    for begin, end in group.turns[1:]:
        count = end - begin
        torch.maximum(found[:count], most[begin:end], out=found[:count])
    return found


def _plain(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute attention within sequences in one product, causal unless `window` is WHOLE."""
    dtype, share = q.dtype, q.shape[1] // k.shape[1]
    q, k, v = (each.to(_working(dtype)) for each in (q, k, v))
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = (q * scale) @ k.transpose(2, 3)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    place = torch.arange(q.shape[2], device=q.device)
    distance = place[:, None] - place
    hidden = distance < 0
    if window == WHOLE:
        hidden = torch.zeros_like(hidden)
    elif window:
        hidden = hidden | (distance >= window)
    scores = scores.masked_fill(hidden, -inf)
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)
        scores = torch.cat((scores, column), -1)
    weights = scores.softmax(-1)
    return (weights[..., : k.shape[2]] @ v).to(dtype)


def _working(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which scores are computed and summed."""
    return torch.float32 if dtype.itemsize < torch.float32.itemsize else dtype


def _fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: int,  # noqa: ARG001 - the operator's own
    scale: float,  # noqa: ARG001
    window: int = 0,  # noqa: ARG001
    softcap: float = 0.0,  # noqa: ARG001
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    if not (q.dim() == k.dim() == v.dim() == 4 and q.dtype == k.dtype == v.dtype):
        raise ValueError("attend takes q, k and v with four dimensions and of one type")
    if q.shape[1] % k.shape[1] or q.shape[3] != k.shape[3] or k.shape[1] != v.shape[1]:
        raise ValueError(f"attend of {list(q.shape)}, {list(k.shape)} and {list(v.shape)}")
    if sinks is not None and list(sinks.shape) != [q.shape[1]]:
        raise ValueError(f"sinks of shape {list(sinks.shape)} for {q.shape[1]} heads")
    return q.new_empty(*q.shape[:3], v.shape[3])


_library.impl("attend", _attend, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]  # of torch
torch.library.register_fake("peerloom::attend", _fake, lib=_library)
ATTEND = torch.ops.peerloom.attend.default


class _Directly:
    """Calls `attend` without torch's dispatcher while a batch is served, because the dispatcher takes as long
    as a few operators."""

    _schema = ATTEND._schema

    def __call__(self, *arguments: Any) -> torch.Tensor:
        found: torch.Tensor = _attend(*arguments) if _batch else ATTEND(*arguments)
        return found


ATTEND_DIRECTLY = _Directly()


def padded(rows: int, multiple: int = ROWS) -> int:
    """Return the next multiple of `multiple` that is at least `rows`."""
    return -(-rows // multiple) * multiple


def attend_flops(q: Sequence[int], v: Sequence[int], context: int) -> int:
    """Return the number of floating-point operations if each row sees as many keys as a session may have."""
    keys = padded(context, PAGE_TOKENS)
    return 2 * q[0] * q[1] * q[2] * keys * (q[3] + v[3])


def attend_bytes(q: Sequence[int], k: Sequence[int], v: Sequence[int], context: int, item_bytes: int) -> int:
    """Return the memory used while it runs, for a session of the maximum length, without the pages and the
    result. `item_bytes` is the size of a value in the type of computation.

    At least one row is computed at a time, and the whole batch of rows is scaled first.
    """
    keys = padded(context, PAGE_TOKENS)
    rows = padded(q[1] // k[1])
    gathered = k[1] * keys * (k[3] + v[3])
    scored = k[1] * rows * keys * 3 + k[1] * rows * (keys // PAGE_TOKENS) * v[3]
    return item_bytes * (q[0] * q[1] * q[2] * q[3] + gathered + scored) + 2 * SCRATCH_BYTES
