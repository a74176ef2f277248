"""Keys and values of served sessions: pages of PAGE_TOKENS tokens, from one pool that all sessions share.

A page has room for the keys and values of all layers of the stage, so one list of pages locates a session.
The pool is bounded by `StageSpecification.cache_bytes`. A unit that finds no page is refused, and no session
is evicted for another: the driver of the stage decides which session may continue. A session's pages are
consecutive if possible, so that it can be read without a copy.

Sessions may share pages: `fork` begins one with the first tokens of another. A shared page has a count of its
sessions. It is free once no session uses it, and is copied before a session writes to it.

`partition.execute.attention` computes on the pages.
"""

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal

import torch

from crypto.errors import RemoteProtocolError
from partition.stage import SERVED_SESSIONS_MAX, Unit

PAGE_TOKENS = 64
"""Number of tokens of a page, and of keys in one block of attention. It affects the bits that a stage
computes, because a different size adds in a different order. It cannot be smaller, because torch computes
products of fewer than 400 multiplications differently."""
_FULL = f"{SERVED_SESSIONS_MAX} sessions are served already. End one first"


class UnitRefused(RemoteProtocolError):
    """A unit cannot be served. `fault` is that of `partition.stage.Refused`."""

    def __init__(self, reason: str, session: bytes, fault: Literal["position", "room"]) -> None:
        super().__init__(reason)
        self.session = session
        self.fault: Literal["position", "room"] = fault


@dataclass(frozen=True)
class LayerShape:
    """The size of one token in one layer: the number of heads of keys and values, and the widths of both."""

    heads: int
    key_width: int
    value_width: int

    @property
    def elements(self) -> int:
        return self.heads * (self.key_width + self.value_width)


@dataclass
class _Session:
    pages: list[int] = field(default_factory=list)
    length: int = 0


@dataclass(frozen=True)
class UnitSpan:
    """One unit in a batch. Its tokens begin at `first` in the flat batch and at `position` in its session;
    `pages` hold the session up to its end."""

    first: int
    position: int
    tokens: int
    pages: tuple[int, ...]


class Pages:
    """The pages of one stage. Not thread-safe."""

    def __init__(
        self, layers: Mapping[int, LayerShape], dtype: torch.dtype, cache_bytes: int, device: torch.device
    ) -> None:
        self._layers = dict(layers)
        self._dtype = dtype
        self._device = device
        page_bytes = PAGE_TOKENS * dtype.itemsize * sum(layer.elements for layer in layers.values())
        self._count = cache_bytes // page_bytes if page_bytes else 0
        self._has_pages = page_bytes > 0
        self._free = set(range(self._count))
        self._shared: dict[int, int] = {}
        """The number of sessions that use a page, if more than one does."""
        self._sessions: dict[bytes, _Session] = {}
        self._pools: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def pool(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values of a layer, [pages, heads, PAGE_TOKENS, width].

        The system allocates the memory when pages are first written.
        """
        if layer not in self._pools:
            shape = self._layers[layer]
            sides = self._count, shape.heads, PAGE_TOKENS
            self._pools[layer] = self._zeros(*sides, shape.key_width), self._zeros(*sides, shape.value_width)
        return self._pools[layer]

    def _zeros(self, *sides: int) -> torch.Tensor:
        # Code that writes to the pool may or may not be in inference mode.
        with torch.inference_mode(False):
            private = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
            if self._device.type != "cpu" or not private or not prod(sides):
                return torch.zeros(*sides, dtype=self._dtype, device=self._device)
            # `torch.zeros` would write all of it: gigabytes at the first token, which would then stay in
            # memory.
            memory = mmap.mmap(-1, prod(sides) * self._dtype.itemsize, flags=private)
            return torch.frombuffer(memory, dtype=self._dtype).view(sides)

    def begin(self, units: Sequence[Unit], context: int) -> tuple[UnitSpan, ...]:
        """Reserve the pages that the units need. The sessions grow only with `commit`.

        Raises:
            UnitRefused: a unit does not follow the tokens held, goes beyond `context` tokens, or finds no
                page. No page is reserved in that case.
            RemoteProtocolError: a session occurs twice.
        """
        if len({unit.session for unit in units}) < len(units):
            raise RemoteProtocolError("a session occurs twice in one batch")
        fresh = sum(unit.session not in self._sessions for unit in units)
        needed = 0
        for unit in units:
            held = self._sessions.get(unit.session, _Session())
            self._check(unit, held.length, context, fresh)
            if self._has_pages:
                needed += max(0, _pages_for(unit.position + unit.tokens) - len(held.pages))
                needed += len(self._to_copy(held, unit))
            if needed > len(self._free):
                raise UnitRefused(
                    (
                        f"{needed} pages of {PAGE_TOKENS} tokens are needed, but "
                        f"{len(self._free)} of {self._count} are free. End a session, or wait"
                    ),
                    unit.session,
                    "room",
                )
        return self._spans(units)

    def fork(self, session: bytes, base: bytes, tokens: int) -> None:
        """Begin a session with the first tokens of another session. The two share its pages from then on.

        Raises:
            UnitRefused: the other session has fewer tokens, or there are too many sessions.
            RemoteProtocolError: the session already exists.
        """
        if session in self._sessions:
            raise RemoteProtocolError("a session that already exists cannot begin again")
        held = self._sessions.get(base, _Session())
        if not 0 < tokens <= held.length:
            raise UnitRefused(
                f"the other session has {held.length} tokens here, but {tokens} are needed",
                session,
                "position",
            )
        if len(self._sessions) >= SERVED_SESSIONS_MAX:
            raise UnitRefused(_FULL, session, "room")
        pages = held.pages[: _pages_for(tokens)]
        for page in pages:
            self._shared[page] = self._shared.get(page, 1) + 1
        self._sessions[session] = _Session(pages, tokens)

    def commit(self, units: Sequence[Unit]) -> None:
        """Commit computed units: each session now ends with its unit, and pages beyond that are freed."""
        for unit in units:
            session = self._sessions[unit.session]
            session.length = unit.position + unit.tokens
            self._trim(session)

    def abandon(self, units: Sequence[Unit]) -> None:
        """Abandon units that were not fully computed. The sessions keep the tokens before them; a unit that
        rolled its session back has shortened it."""
        for unit in units:
            session = self._sessions[unit.session]
            session.length = min(session.length, unit.position)
            self._trim(session)
            self._clear_tail(session)
            if not session.length:
                del self._sessions[unit.session]

    def end(self, session: bytes) -> None:
        """Free the pages of a session; an unknown session is ignored."""
        found = self._sessions.pop(session, None)
        if found is not None:
            self._give_back(found.pages)

    def _check(self, unit: Unit, held: int, context: int, fresh: int) -> None:
        if unit.position > held:
            raise UnitRefused(
                f"the session has {held} tokens here, but the unit begins at {unit.position}",
                unit.session,
                "position",
            )
        if unit.position + unit.tokens > context:
            raise UnitRefused(
                f"{unit.position + unit.tokens} tokens in one session, but at most {context} are served",
                unit.session,
                "position",
            )
        if unit.session not in self._sessions and len(self._sessions) + fresh > SERVED_SESSIONS_MAX:
            raise UnitRefused(_FULL, unit.session, "room")

    def _to_copy(self, session: _Session, unit: Unit) -> list[int]:
        """Return the positions, in a session's list of pages, of those that a unit writes to and other
        sessions share."""
        last = min(len(session.pages), _pages_for(unit.position + unit.tokens))
        places = range(unit.position // PAGE_TOKENS, last)
        return [place for place in places if session.pages[place] in self._shared]

    def _spans(self, units: Sequence[Unit]) -> tuple[UnitSpan, ...]:
        spans, first = [], 0
        for unit in units:
            session = self._sessions.setdefault(unit.session, _Session())
            count = _pages_for(unit.position + unit.tokens) if self._has_pages else 0
            for place in self._to_copy(session, unit) if count else ():
                self._copy(session, place, unit.position)
            while len(session.pages) < count:
                page = self._next_page(session, count - len(session.pages))
                self._free.remove(page)
                session.pages.append(page)
                self._clear(page, 0)
            spans.append(UnitSpan(first, unit.position, unit.tokens, tuple(session.pages[:count])))
            first += unit.tokens
        return tuple(spans)

    def _next_page(self, session: _Session, wanted: int) -> int:
        """Return the page after the session's last one. If that is not free, return a page with many free
        pages after it."""
        if session.pages and session.pages[-1] + 1 in self._free:
            return session.pages[-1] + 1
        runs: list[tuple[int, int]] = []
        begin = last = -2
        for page in sorted(self._free):
            if page != last + 1:
                begin = page
                runs.append((0, begin))
            last = page
            runs[-1] = (last - begin + 1, begin)
        length, begin = max(runs)
        # The session that ends before this run may need to grow into it.
        return begin + (length // 2 if begin and length >= 2 * wanted else 0)

    def _copy(self, session: _Session, place: int, position: int) -> None:
        """Give a session its own copy of a shared page, with the tokens before `position`."""
        shared = session.pages[place]
        page = self._next_page(_Session(session.pages[:place]), 1)
        self._free.remove(page)
        session.pages[place] = page
        kept = max(0, position - place * PAGE_TOKENS)
        for pools in self._pools.values():
            for pool in pools:
                pool[page, :, :kept] = pool[shared, :, :kept]
        self._clear(page, kept)
        self._give_back([shared])

    def _give_back(self, pages: Sequence[int]) -> None:
        for page in pages:
            holders = self._shared.pop(page, 1) - 1
            if holders > 1:
                self._shared[page] = holders
            elif not holders:
                self._free.add(page)

    def _trim(self, session: _Session) -> None:
        count = _pages_for(session.length)
        self._give_back(session.pages[count:])
        del session.pages[count:]

    def _clear_tail(self, session: _Session) -> None:
        # A page that other sessions share too has not been written to.
        if session.pages and session.length % PAGE_TOKENS and session.pages[-1] not in self._shared:
            self._clear(session.pages[-1], session.length % PAGE_TOKENS)

    def _clear(self, page: int, slot: int) -> None:
        """Zero a page from a slot on. Hidden keys are multiplied by zero, so they must be finite, and another
        session's values must not remain."""
        for pools in self._pools.values():
            for pool in pools:
                pool[page, :, slot:].zero_()


def _pages_for(tokens: int) -> int:
    return -(-tokens // PAGE_TOKENS)


def shape_of_layer(key: Sequence[int], value: Sequence[int]) -> LayerShape:
    """Return the shape of the keys and values of `attend`, [1, heads, tokens, width].

    Raises:
        RemoteProtocolError: attention cannot take these tensors.
    """
    if len(key) != 4 or len(value) != 4 or key[:3] != value[:3] or key[0] != 1 or not prod(key):
        raise RemoteProtocolError(
            f"keys {list(key)} and values {list(value)} of attention do not fit together"
        )
    return LayerShape(key[1], key[3], value[3])
