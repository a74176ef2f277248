"""States of sessions: what entry points such as `decode` keep between calls, mainly a KV cache.

A session begins with zeros when it is first named. The requester ends it. A session beyond the limit is
refused instead of replacing an old one, whose states could not be restored.
"""

from collections.abc import Mapping, Sequence
from math import prod

import torch

from crypto.errors import RemoteProtocolError
from partition.execute.interpret import DTYPES
from partition.model.graph import ITEM_BYTES, TensorType
from partition.stage import SESSIONS_MAX, StageSpecification
from partition.stage_layout import arena_bytes


class StageSessions:
    """The states of one stage, by session and row. A stage without states has no sessions to keep."""

    def __init__(self, specification: StageSpecification, device: torch.device) -> None:
        self._rows = specification.graph.state_rows
        self.kinds: tuple[TensorType, ...] = tuple(state.type for state in specification.graph.states)
        self._device = device
        self._kept: dict[bytes, dict[int, torch.Tensor]] = {}
        self._free_bytes = specification.memory_bytes_max - sum(arena_bytes(specification).values())

    def has(self, session: bytes) -> bool:
        return session in self._kept

    def states(self, session: bytes, shapes: Sequence[tuple[int, ...]]) -> dict[int, torch.Tensor]:
        """Return the session's states by row. If the session is new, return its initial states, which are
        stored only by `keep`.

        Raises:
            RemoteProtocolError: there are too many sessions, no memory for a new one, or the sizes differ
                from the session's.
        """
        if session in self._kept:
            states = self._kept[session]
            if [tuple(state.shape) for state in states.values()] != list(shapes):
                raise RemoteProtocolError("a session must keep the sizes with which it began")
            return states
        if not self._rows:
            return {}
        if len(self._kept) >= SESSIONS_MAX:
            raise RemoteProtocolError(f"{SESSIONS_MAX} sessions are open already. End one first")
        size = sum(
            prod(shape) * ITEM_BYTES[kind.dtype] for shape, kind in zip(shapes, self.kinds, strict=True)
        )
        if size > self._free_bytes:
            raise RemoteProtocolError(f"no memory for the {size} bytes of a new session")
        return {
            row: torch.zeros(shape, dtype=DTYPES[kind.dtype], device=self._device)
            for row, kind, shape in zip(self._rows, self.kinds, shapes, strict=True)
        }

    def keep(
        self, session: bytes, states: dict[int, torch.Tensor], updates: Mapping[int, torch.Tensor]
    ) -> None:
        """Store the states after a call: those changed in place, and `updates`.

        Raises:
            RemoteProtocolError: the type or shape of an update is not its state's. Nothing is stored then.
        """
        for row, tensor in updates.items():
            if tensor.dtype != states[row].dtype or tensor.shape != states[row].shape:
                raise RemoteProtocolError("the next value of a state has a different type or shape")
        if not self._rows:
            return
        if session not in self._kept:
            self._free_bytes -= _size_bytes(states)
            self._kept[session] = states
        # A copy, because an update may share memory with a different state, and a later call may write to
        # either.
        states.update(
            {row: tensor.clone(memory_format=torch.contiguous_format) for row, tensor in updates.items()}
        )

    def end(self, session: bytes) -> None:
        """Forget a session; an unknown session is ignored."""
        self._free_bytes += _size_bytes(self._kept.pop(session, {}))


def _size_bytes(states: Mapping[int, torch.Tensor]) -> int:
    return sum(state.numel() * state.element_size() for state in states.values())
