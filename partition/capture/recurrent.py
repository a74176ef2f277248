"""LSTM, GRU and plain RNN as the operators of which they consist, with one copy of the cell for each position
of the sequence.

torch computes them with one fused operator that differs from machine to machine. Unrolled, they are linear
maps and gates that anyone can check, estimate and cut. The sequence's length must be fixed, because it is the
number of cells. Gates are in torch's order, and the formulas are those in the documentation of
`torch.nn.LSTM` and `torch.nn.GRU` (Hochreiter and Schmidhuber 1997 with projections of Sak 2014; Cho 2014).
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from partition.capture.errors import CaptureRefused
from partition.capture.steps import Call, Emitter, Handle
from partition.model.graph import ITEMS_MAX

_aten = torch.ops.aten
Recurrent = Callable[[Call], Any]
"""A function that returns a handle for the result, or a list of handles if there are several."""
State = tuple[Handle, ...]
Cell = Callable[[Emitter, Handle, State, Sequence[Handle], bool], State]
"""A function that takes the input's part of the gates, the state and the layer's weights, and returns the
next state."""


def _linear(walk: Emitter, x: Handle, weights: Sequence[Handle], first: int, biases: bool) -> Handle:
    bias = [weights[first + 2]] if biases else []
    mapped: Handle = walk.emit(_aten.linear.default, x, weights[first], *bias)
    return mapped


def _lstm_cell(walk: Emitter, given: Handle, state: State, weights: Sequence[Handle], biases: bool) -> State:
    hidden, cell = state
    gates = walk.emit(_aten.add.Tensor, _linear(walk, hidden, weights, 1, biases), given)
    into, forget, new, out = walk.emit(_aten.chunk.default, gates, 4, 1)
    into, forget, out = (walk.emit(_aten.sigmoid.default, gate) for gate in (into, forget, out))
    kept = walk.emit(_aten.mul.Tensor, forget, cell)
    added = walk.emit(_aten.mul.Tensor, into, walk.emit(_aten.tanh.default, new))
    cell = walk.emit(_aten.add.Tensor, kept, added)
    hidden = walk.emit(_aten.mul.Tensor, out, walk.emit(_aten.tanh.default, cell))
    projection = weights[4 if biases else 2 :]
    if projection:
        hidden = walk.emit(_aten.linear.default, hidden, projection[0])
    return hidden, cell


def _gru_cell(walk: Emitter, given: Handle, state: State, weights: Sequence[Handle], biases: bool) -> State:
    (hidden,) = state
    given_reset, given_update, given_new = walk.emit(_aten.chunk.default, given, 3, 1)
    gates = _linear(walk, hidden, weights, 1, biases)
    held_reset, held_update, held_new = walk.emit(_aten.chunk.default, gates, 3, 1)
    reset = walk.emit(_aten.sigmoid.default, walk.emit(_aten.add.Tensor, held_reset, given_reset))
    update = walk.emit(_aten.sigmoid.default, walk.emit(_aten.add.Tensor, held_update, given_update))
    held_new = walk.emit(_aten.mul.Tensor, held_new, reset)
    new = walk.emit(_aten.tanh.default, walk.emit(_aten.add.Tensor, given_new, held_new))
    kept = walk.emit(_aten.mul.Tensor, walk.emit(_aten.sub.Tensor, hidden, new), update)
    return (walk.emit(_aten.add.Tensor, kept, new),)


def _plain_cell(activation: Any) -> Cell:
    def cell(walk: Emitter, given: Handle, state: State, weights: Sequence[Handle], biases: bool) -> State:
        total = walk.emit(_aten.add.Tensor, _linear(walk, state[0], weights, 1, biases), given)
        return (walk.emit(activation, total),)

    return cell


def _direction(
    walk: Emitter,
    x: Handle,
    state: State,
    weights: Sequence[Handle],
    cell: Cell,
    backward: bool,
    biases: bool,
) -> tuple[Handle, State]:
    """Run one layer in one direction over x of (sequence, batch, features). Return all hidden states and the
    last state."""
    # The inputs' part of all gates together: one large product instead of many small ones.
    given = walk.emit(_aten.unbind.int, _linear(walk, x, weights, 0, biases))
    hidden = []
    for share in reversed(given) if backward else given:
        state = cell(walk, share, state, weights, biases)
        hidden.append(state[0])
    if backward:
        hidden.reverse()
    return walk.emit(_aten.stack.default, hidden), state


def _unrolled(cell: Cell, states: int) -> Recurrent:
    """Return the rewrite of an operator whose cell carries `states` tensors."""

    def unroll(call: Call) -> list[Handle]:
        walk, arguments = call.walk, call.arguments
        x, first, weights = arguments[:3]
        biases, layers, dropout, train, bidirectional, batch_first = arguments[3:9]
        begin = list(first) if isinstance(first, list | tuple) else [first]
        x = walk.emit(_aten.transpose.int, x, 0, 1) if batch_first else x
        length = x.fake.shape[0]
        if not isinstance(length, int) or length > ITEMS_MAX:
            raise CaptureRefused(
                "a recurrent layer is unrolled, so its sequence length must be fixed and "
                f"at most {ITEMS_MAX}, not {length}"
            )
        directions = 2 if bidirectional else 1
        each = len(weights) // (layers * directions)
        ends: list[State] = []
        for layer in range(layers):
            outputs = []
            for direction in range(directions):
                place = layer * directions + direction
                state = tuple(walk.emit(_aten.select.int, tensor, 0, place) for tensor in begin)
                share = weights[place * each : (place + 1) * each]
                output, end = _direction(walk, x, state, share, cell, direction == 1, biases)
                outputs.append(output)
                ends.append(end)
            x = walk.emit(_aten.cat.default, outputs, 2) if directions == 2 else outputs[0]
            if dropout > 0 and layer < layers - 1:
                x = walk.emit(_aten.dropout.default, x, dropout, train)
        last = [walk.emit(_aten.stack.default, [end[index] for end in ends]) for index in range(states)]
        return [walk.emit(_aten.transpose.int, x, 0, 1) if batch_first else x, *last]

    return unroll


def _single(cell: Cell, states: int) -> Recurrent:
    """Return the rewrite of a single cell; its state is a list if it has several tensors."""

    def step(call: Call) -> Any:
        x, first, *weights = call.arguments
        weights = [weight for weight in weights if weight is not None]
        biases = len(weights) == 4
        state = tuple(first) if states > 1 else (first,)
        end = cell(call.walk, _linear(call.walk, x, weights, 0, biases), state, weights, biases)
        return list(end) if states > 1 else end[0]

    return step


RECURRENT: Mapping[str, Recurrent] = MappingProxyType(
    {
        "aten.lstm.input": _unrolled(_lstm_cell, 2),
        "aten.gru.input": _unrolled(_gru_cell, 1),
        "aten.rnn_tanh.input": _unrolled(_plain_cell(_aten.tanh.default), 1),
        "aten.rnn_relu.input": _unrolled(_plain_cell(_aten.relu.default), 1),
        "aten.lstm_cell.default": _single(_lstm_cell, 2),
        "aten.gru_cell.default": _single(_gru_cell, 1),
        "aten.rnn_tanh_cell.default": _single(_plain_cell(_aten.tanh.default), 1),
        "aten.rnn_relu_cell.default": _single(_plain_cell(_aten.relu.default), 1),
    }
)
"""Rewrites by the operator's full name."""
