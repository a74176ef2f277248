"""A peer that hands over states in every wrong way, a different one each time: `/peerloom/catchup/1`.

Its messages are plausible: steps a little or far ahead, tables like the honest one with different hashes,
states of the right size that are NaN, zero, or negated. It falls silent, hangs up or sends nonsense at each
point of the conversation.
"""

from random import Random
from typing import Any

import numpy as np
import trio
from msgspec.structs import replace

from crypto.encoding import decode, encode
from node.averaging.snapshot import Snapshot, SnapshotTable, make_snapshot
from node.averaging.transfer import Fetch, NoState, Question, Sent, StateOffer, StateRequest
from node.seams import Stream

STEPS_AHEAD = (0, 1, 2, 4, 100, 2**20, 2**52)
FACTORS = (0.0, -1.0, 2.0, 1e30, np.nan, np.inf)
"""Factors by which the honest values are multiplied."""


class LyingDonor:
    """Answers at random, with `rng`. `honest` is the state that others deliver. `said` contains the names of
    its lies so far."""

    def __init__(self, rng: Random, honest: Snapshot) -> None:
        self._rng = rng
        self._honest = honest
        self.said: set[str] = set()
        with np.errstate(all="ignore"):
            numbers = np.frombuffer(honest.data, np.float32) * np.float32(rng.choice(FACTORS))
        step = self.claimed_step = honest.table.step + rng.choice(STEPS_AHEAD)
        vector = numbers.view(np.uint8)
        self._state = make_snapshot(step, 1, bytes(32), {"parameters": ("float32", numbers.shape, vector)})

    async def serve(self, stream: Stream) -> None:
        """Handle one stream until a lie ends it."""
        while True:
            question: Question = decode(await stream.receive(), Question, bytes_max=1_024)
            if isinstance(question, StateRequest):
                await self._offer(stream)
            else:
                await self._send(stream, question)

    async def _offer(self, stream: Stream) -> None:
        kinds = ("state", "digest", "step", "size", "nothing", "silence", "end", "nonsense")
        # Half of the offers are honest, because chunks are requested only from an offer that looks right.
        kind = self._lie(*kinds, *["honest"] * len(kinds))
        table = self._table(kind)
        if kind == "nothing":
            await stream.send(encode(NoState("no state yet")))
        elif kind == "nonsense":
            await stream.send(self._rng.randbytes(40))
        else:
            await self._pause(kind, stream)
            await stream.send(encode(StateOffer(table)))

    def _table(self, kind: str) -> SnapshotTable:
        """Return the table of its own state, or a table that is nearly the honest one."""
        honest = self._honest.table
        if kind == "state":
            return self._state.table
        if kind == "digest":
            return replace(honest, chunks=(self._rng.randbytes(32), *honest.chunks[1:]))
        if kind == "step":
            return replace(honest, step=honest.step + self._rng.choice(STEPS_AHEAD))
        if kind == "size":
            return replace(honest, chunks=(*honest.chunks, bytes(32)))
        return honest

    async def _send(self, stream: Stream, asked: Fetch) -> None:
        for number in range(asked.first, asked.first + asked.count):
            kind = self._lie("state", "right", "number", "cut", "long", "silence", "end", "nothing")
            source = self._honest if kind == "right" else self._state
            data: Any = bytes(source.chunk(number % max(1, len(source.table.chunks))))
            if kind == "nothing":
                await stream.send(encode(NoState("this state is no longer kept")))
                return
            await self._pause(kind, stream)
            said = Sent(number + 1 if kind == "number" else number)
            data = data[:-1] if kind == "cut" else data + b"\0" if kind == "long" else data
            await stream.send(encode(said), data)

    async def _pause(self, kind: str, stream: Stream) -> None:
        if kind == "silence":
            await trio.sleep_forever()
        if kind == "end":
            await stream.aclose()

    def _lie(self, *kinds: str) -> str:
        kind = self._rng.choice(kinds)
        self.said.add(kind)
        return kind
