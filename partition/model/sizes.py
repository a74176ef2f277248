"""Integers made of the sizes of the inputs: the table of expressions, evaluated within 63 bits.

A stranger writes the table, so each row costs one bounded operation and its result is checked before the
next row may use it: no integer grows beyond 63 bits, however the rows are chained.
"""

from collections.abc import Sequence

from crypto.errors import RemoteProtocolError
from partition.model.graph import INTEGER_MAX, Expression, Size, Symbol, TensorType

Sides = tuple[int, ...]


def evaluate(expressions: Sequence[Expression], sizes: Sequence[int]) -> tuple[int, ...]:
    """Return every row of the table, where `sizes` are the symbols' values.

    Raises:
        RemoteProtocolError: a row that points forward or to no symbol, divides by zero, or leaves 63 bits.
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
        raise RemoteProtocolError("a size that is made of later ones")
    return values[operand.row]


def shape_of(kind: TensorType, values: Sequence[int]) -> Sides:
    """Return the shape of a type, given the evaluated table. Raises RemoteProtocolError: a side below
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
    """Return the symbols' values that make inputs of `types` have `shapes`.

    A symbol is read off wherever it stands alone as a side. A symbol that no type has, because it belongs to
    another entry point, is at its minimum.

    Raises:
        RemoteProtocolError: shapes that do not fit, a symbol that no input tells, or one out of its bounds.
    """
    found: dict[int, int] = {}
    composed = False
    for kind, shape in zip(types, shapes, strict=True):
        if len(kind.shape) != len(shape):
            raise RemoteProtocolError(f"a tensor of {len(shape)} dimensions where {len(kind.shape)} belong")
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
            raise RemoteProtocolError(f"no input tells the size '{symbol.name}'")
        sizes.append(found.get(row, symbol.minimum))
    check_sizes(symbols, sizes)
    values = evaluate(expressions, sizes)
    for kind, shape in zip(types, shapes, strict=True):
        if shape_of(kind, values) != tuple(shape):
            raise RemoteProtocolError(
                f"a tensor of shape {tuple(shape)} where {shape_of(kind, values)} belongs"
            )
    return tuple(sizes)


def check_sizes(symbols: Sequence[Symbol], sizes: Sequence[int]) -> None:
    """Check sizes. Raises RemoteProtocolError: another number of sizes than symbols, or one out of its
    symbol's bounds."""
    if len(sizes) != len(symbols):
        raise RemoteProtocolError(f"{len(sizes)} sizes where {len(symbols)} belong")
    for symbol, size in zip(symbols, sizes, strict=True):
        if not symbol.minimum <= size <= symbol.maximum:
            raise RemoteProtocolError(
                f"{symbol.name} is {size}, allowed are {symbol.minimum} to {symbol.maximum}"
            )
