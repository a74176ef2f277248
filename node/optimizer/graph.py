"""Finds the number of samples in a loss from the shapes in its autograd graph, without unpacking any tensor.

The number is the first dimension of the tensor that the loss reduces to one number. If that tensor was
reshaped, as in `logits.view(-1, classes)`, it is the first dimension of the tensor before. The number counts
only if every operation in which a parameter meets data agrees. That means: its result has this many rows, or
has them in the second dimension (time first), or has a multiple (flattened), and at least one has exactly
this many. Results that are only broadcast over a batch, such as position embeddings, are ignored. If parts of
a loss or its operations disagree, or the graph does not show a number, a text says so instead.
"""

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import torch

NODES_MAX = 200_000
"""Maximum number of operations read in one graph: half a second. A larger graph gives no number."""
Shape = tuple[int, ...]
Unknown = str
"""Why the number is not known."""

LEAF = "torch::autograd::AccumulateGrad"
VIEWS = ("View", "UnsafeView", "ReshapeAlias", "Alias", "Transpose", "Permute", "Unsqueeze", "Squeeze",
         "Expand", "Slice", "Select", "Clone", "ToCopy", "T")  # fmt: skip
"""Operations that return the same values in a different shape."""
RESHAPES = ("View", "UnsafeView", "ReshapeAlias")
SELECTIONS = ("Index", "MaskedSelect", "Slice", "Gather")
POINTWISE = ("Add", "Sub", "Mul", "Div", "Where", "Pow", "Neg", "Clamp")
LOOKUPS = ("Embedding", "EmbeddingBag", "Index", "IndexSelect", "Gather")
"""Operations whose data is not in the graph: indices have no gradient."""


class LossReader:
    """Reads one script's graphs. For a kind of graph that was already checked, it reads only the first
    nodes."""

    def __init__(self) -> None:
        self._checked: set[tuple[str, ...]] = set()

    def samples(self, roots: Iterable[torch.Tensor]) -> int | Unknown:
        """Return how many samples these losses were computed from, or why that is not known."""
        losses = [root for root in roots if root.grad_fn is not None]
        if not all(hasattr(loss.grad_fn, "_input_metadata") for loss in losses):
            return f"the graphs of torch {torch.__version__} show no shapes"
        path: list[str] = []
        found: set[int] = set()
        for node, shape in _reduced(losses):
            if not _is_spread_of_parameter(node, shape):
                found.add(_rows(node, shape, path))
        if len(found) > 1:
            rows = " and ".join(map(str, sorted(found)))
            return f"parts of the loss are made of {rows} rows"
        if not found:
            return "the loss's graph shows no rows, as where the loss is compiled or made of one number"
        (count,) = found
        kind = tuple(path)
        if kind in self._checked:
            return count
        wrong = _contradiction(losses, count)
        if wrong:
            return wrong
        self._checked.add(kind)
        return count


def reaches(losses: Iterable[torch.Tensor], parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether a loss's graph leads to one of these parameters."""
    wanted = {id(parameter) for parameter in parameters}
    todo: list[Any] = [loss.grad_fn for loss in losses]
    seen: set[Any] = set()
    while todo and len(seen) < NODES_MAX:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == LEAF and id(node.variable) in wanted:
            return True
        todo += [child for child, _ in node.next_functions]
    return False


def _operation(node: Any) -> str:
    """Return the operation's name without its overload; empty if it is not torch's own."""
    name, backward, number = str(node.name()).partition("Backward")
    return name if backward and number.isdigit() else ""


def _shapes(node: Any) -> list[Shape]:
    """Return the shapes of an operation's results."""
    return [tuple(int(size) for size in each.shape) for each in node._input_metadata if each is not None]


def _children(node: Any) -> list[tuple[Any, Shape]]:
    """Return the operations whose results enter this one, each with the shape of that result."""
    found = []
    for child, number in node.next_functions:
        if child is not None:
            shapes = _shapes(child)
            found.append((child, shapes[number] if number < len(shapes) else ()))
    return found


def _reduced(losses: Iterable[torch.Tensor]) -> Iterator[tuple[Any, Shape]]:
    """Yield the inputs that the losses reduce: the nearest results below them with more than one value."""
    todo: list[tuple[Any, Shape]] = [(loss.grad_fn, tuple(loss.shape)) for loss in losses]
    seen = set()
    while todo:
        node, shape = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if prod(shape) != 1:
            yield node, shape
        elif node.name() != LEAF and len(seen) < NODES_MAX:
            todo += _children(node)


def _is_spread_of_parameter(node: Any, shape: Shape) -> bool:
    """Return whether this is a parameter with only elementwise operations, that is, a penalty on weights and
    not a sample."""
    while node.name() != LEAF:
        below = _children(node)
        if len(below) != 1 or prod(below[0][1]) != prod(shape) or _operation(node) in LOOKUPS:
            return False
        node = below[0][0]
    return True


def _rows(node: Any, shape: Shape, path: list[str]) -> int:
    """Return the first dimension of this result, or of the tensor before it was flattened or selected from.
    `path` receives the operations on the way."""
    path.append(f"{node.name()}/{len(shape)}")
    if node.name() == LEAF:
        return shape[0]
    below = [(child, size) for child, size in _children(node) if size]
    if any(child.name() == LEAF for child, _ in below):
        return shape[0]
    kind = _operation(node)
    for child, size in below:
        if size[0] == shape[0] and len(size) >= len(shape):
            return _rows(child, size, path) if len(path) < 100 else shape[0]
    for child, size in below:
        flattened = {prod(size[:count]) for count in range(1, len(size) + 1)}
        if (kind in RESHAPES and shape[0] in flattened) or kind in SELECTIONS:
            return _rows(child, size, path) if len(path) < 100 else size[0]
    return shape[0]


def _contradiction(losses: Iterable[torch.Tensor], count: int) -> Unknown:
    """Return how the operations on parameters contradict this number of samples, or "" if they do not."""
    order, parents = _walk([loss.grad_fn for loss in losses if loss.grad_fn is not None])
    if len(order) >= NODES_MAX:
        return f"the loss's graph has more than {NODES_MAX} operations"
    of_parameters: set[Any] = set()
    agreed = 0
    for node in order:  # children first
        if node.name() == LEAF:
            of_parameters.add(node)
            continue
        below = [(child, shape) for child, shape in _children(node) if child in of_parameters]
        if not below:
            continue
        shapes = [shape for shape in _shapes(node) if prod(shape) != 1 or (count == 1 and shape)]
        has_data = len(below) < len(node.next_functions) or not _operation(node)
        is_same_size = _operation(node) in POINTWISE and all(
            child in of_parameters for child, _ in _children(node)
        )
        is_same_size = is_same_size and shapes == [below[0][1]]
        if (not has_data or is_same_size) and _operation(node) not in LOOKUPS:
            of_parameters.add(node)
        elif any(_has_rows(shape, count) for shape in shapes + _reshaped(node, parents)):
            agreed += 1
        elif any(shape[0] and shape[0] % count == 0 for shape in shapes):
            continue  # flattened, or by chance
        elif not shapes or _is_spread(node, shapes[0], parents):
            of_parameters.add(node)
        else:
            size = "x".join(map(str, shapes[0]))
            return f"the loss is made of {count} rows, but a result of {node.name()} in it is {size}"
    return (
        "" if agreed else f"the loss is made of {count} rows, and nothing that meets a parameter has as many"
    )


def _has_rows(shape: Shape, count: int) -> bool:
    """Return whether a result of this shape has this many rows, in the first dimension, or in the second if
    time comes first."""
    return bool(shape) and (shape[0] == count or (len(shape) == 3 and shape[1] == count))


def _reshaped(node: Any, parents: dict[Any, list[Any]]) -> list[Shape]:
    """Return the shapes into which a result is directly reshaped, as a linear layer does with flattened
    rows."""
    found = [parent for parent in parents.get(node, ()) if _operation(parent) in RESHAPES]
    return [shape for parent in found for shape in _shapes(parent)]


def _is_spread(node: Any, shape: Shape, parents: dict[Any, list[Any]]) -> bool:
    """Return whether a result is only added to a larger one, or scales it, perhaps after a reshape or
    reduction."""
    todo, seen = list(parents.get(node, ())), set()
    while todo:
        parent = todo.pop()
        if parent in seen:
            continue
        seen.add(parent)
        kind, larger = _operation(parent), _shapes(parent)
        if kind in POINTWISE and any((prod(each), len(each)) > (prod(shape), len(shape)) for each in larger):
            return True
        if kind in VIEWS or kind in POINTWISE or all(prod(each) == 1 for each in larger):
            todo += parents.get(parent, ())
    return False


def _walk(roots: Iterable[Any]) -> tuple[list[Any], dict[Any, list[Any]]]:
    """Return all operations below the roots, each after its inputs, and the users of each operation."""
    order: list[Any] = []
    parents: dict[Any, list[Any]] = {}
    seen = set()
    todo: list[tuple[Any, bool]] = [(root, False) for root in roots]
    while todo and len(order) < NODES_MAX:
        node, is_done = todo.pop()
        if is_done:
            order.append(node)
            continue
        if node in seen:
            continue
        seen.add(node)
        todo.append((node, True))
        for child, _ in node.next_functions:
            if child is not None:
                parents.setdefault(child, []).append(node)
                if child not in seen:
                    todo.append((child, False))
    return order, parents
