"""Integers computed from the sizes of the inputs: the table of expressions, evaluated within 63 bits.

An unknown peer may have written the table. So each row is one bounded operation, and its result is checked
before the next row may use it: no integer grows beyond 63 bits, however the rows are chained.
"""

from collections.abc import Sequence

from crypto.errors import RemoteProtocolError
from partition.model.graph import INTEGER_MAX, Expression, Size, Symbol, TensorType

Sides = tuple[int, ...]


def evaluate(expressions: Sequence[Expression], sizes: Sequence[int]) -> tuple[int, ...]:
    """Return every row of the table; `sizes` are the symbols' values.

    Raises:
        RemoteProtocolError: a row refers to a later row or to no symbol, divides by zero, or exceeds 63 bits.
    """
    values: list[int] = []
    for row, expression in enumerate(expressions):
        left = _operand(expression.left, values)
        right = _operand(expression.right, values)
        match expression.operator:
            case "symbol":
                if not 0 <= left < len(sizes):
                    raise RemoteProtocolError(f"size {row} names no symbol")
                value = sizes[left]
            case "add":
                value = left + right
            case "sub":
                value = left - right
            case "mul":
                value = left * right
            case "min":
                value = min(left, right)
            case "max":
                value = max(left, right)
            case "floordiv" | "mod":
                if right == 0:
                    raise RemoteProtocolError(f"size {row} divides by zero")
                value = left // right if expression.operator == "floordiv" else left % right
        if abs(value) > INTEGER_MAX:
            raise RemoteProtocolError(f"size {row} leaves 63 bits")
        values.append(value)
    return tuple(values)


def _operand(operand: int | Size, values: Sequence[int]) -> int:
    if not isinstance(operand, Size):
        return operand
    if operand.row >= len(values):
        raise RemoteProtocolError("a size that is computed from later ones")
    return values[operand.row]


def shape_of(kind: TensorType, values: Sequence[int]) -> Sides:
    """Return the shape of a type, given the evaluated table. Raises RemoteProtocolError if a side is below
    zero."""
    shape = tuple(values[side.row] if isinstance(side, Size) else side for side in kind.shape)
    if min(shape, default=0) < 0:
        raise RemoteProtocolError(f"a shape with a negative side: {shape}")
    return shape


def bind(
    symbols: Sequence[Symbol],
    expressions: Sequence[Expression],
    types: Sequence[TensorType],
    shapes: Sequence[Sides],
) -> Sides:
    """Return the symbols' values with which inputs of `types` have `shapes`.

    A symbol is read from any side that consists of it alone. A symbol that occurs in no type, because it
    belongs to a different entry point, gets its minimum.

    Raises:
        RemoteProtocolError: shapes do not fit, no input determines a symbol, or a symbol is out of bounds.
    """
    found: dict[int, int] = {}
    composed = False
    for kind, shape in zip(types, shapes, strict=True):
        if len(kind.shape) != len(shape):
            raise RemoteProtocolError(
                f"a tensor of {len(shape)} dimensions, but {len(kind.shape)} are expected"
            )
        for side, given in zip(kind.shape, shape, strict=True):
            if isinstance(side, Size) and side.row < len(expressions):
                expression = expressions[side.row]
                if expression.operator == "symbol" and isinstance(expression.left, int):
                    found.setdefault(expression.left, given)
                else:
                    composed = True
    sizes = []
    for row, symbol in enumerate(symbols):
        if row not in found and composed:
            raise RemoteProtocolError(f"no input determines the size '{symbol.name}'")
        sizes.append(found.get(row, symbol.minimum))
    check_sizes(symbols, sizes)
    values = evaluate(expressions, sizes)
    for kind, shape in zip(types, shapes, strict=True):
        if shape_of(kind, values) != tuple(shape):
            raise RemoteProtocolError(
                f"a tensor of shape {tuple(shape)}, but {shape_of(kind, values)} is expected"
            )
    return tuple(sizes)


def check_sizes(symbols: Sequence[Symbol], sizes: Sequence[int]) -> None:
    """Check sizes. Raises RemoteProtocolError if their number differs from that of the symbols, or one is out
    of its symbol's bounds."""
    if len(sizes) != len(symbols):
        raise RemoteProtocolError(f"{len(sizes)} sizes where {len(symbols)} belong")
    for symbol, size in zip(symbols, sizes, strict=True):
        if not symbol.minimum <= size <= symbol.maximum:
            raise RemoteProtocolError(
                f"{symbol.name} is {size}, but must be from {symbol.minimum} to {symbol.maximum}"
            )
