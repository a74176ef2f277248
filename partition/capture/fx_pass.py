"""One pass over torch's graph that turns it into steps, operator by operator, in the order in which they
run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from partition.capture.advice import SIZED_BY_DATA, remedy_for
from partition.capture.errors import CaptureRefused
from partition.capture.export import ExportedGraph
from partition.capture.inplace import write
from partition.capture.means import MEANS
from partition.capture.origin import place_of_node
from partition.capture.recurrent import RECURRENT
from partition.capture.rewrite import REWRITES, with_tensor_first
from partition.capture.steps import (
    Call,
    Handle,
    Leaf,
    Step,
    TraceStorage,
    bound,
    handles_in,
    made,
    name_of,
    replaced,
    stored,
)
from partition.capture.wrapper_module import COUNTER, strip
from partition.model.operators import OPERATORS

_aten = torch.ops.aten
REASON_LENGTH_MAX = 200
"""Maximum length of an exception's text in a quotation."""


class _Typed:
    """A handle represented by its type, as a cache key: its text is equal for handles for which fake tensors
    behave the same."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle

    def __repr__(self) -> str:
        fake = self.handle.fake
        return f"{fake.dtype}{tuple(fake.shape)}{tuple(fake.stride())}"


@dataclass
class Walk:
    """One pass over torch's graph."""

    exported: ExportedGraph
    mode: FakeTensorMode
    steps: list[Step] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    leaves: dict[Leaf, Handle] = field(default_factory=dict)
    counters: dict[str, None] = field(default_factory=dict)
    owner: str = ""
    trace: str | None = None
    has_gradients: bool = True
    detached: dict[Handle, Handle] = field(default_factory=dict)
    known: dict[str, Any] = field(default_factory=dict)
    unknown: set[Any] = field(default_factory=set)

    @property
    def trains(self) -> bool:
        return self.exported.request.train

    @property
    def has_loss(self) -> bool:
        return self.exported.request.loss is not None

    # Interface for rewrites

    def emit(self, operator: Any, *arguments: Any, fakes: Any = None, **keywords: Any) -> Any:
        """Append a step. Return its results as one handle, or as a list of handles if the operator has
        several.

        `fakes` are the results' types if they are known. An operator that a graph must not contain is
        decomposed if torch knows how; otherwise it is recorded as refused.
        """
        name = name_of(operator)
        arguments = tuple(with_tensor_first(self, operator, arguments))
        if name not in OPERATORS and (apart := self._taken_apart(operator, arguments, keywords)) is not None:
            return apart
        if fakes is None:
            fakes = self.run(operator, arguments, keywords)
        results = tuple(fakes) if isinstance(fakes, list | tuple) else (fakes,)
        if name not in OPERATORS:
            self.refuse(f"the operator {name} cannot be in a graph; {remedy_for(name)}")
        if not all(isinstance(result, torch.Tensor) for result in results):
            raise CaptureRefused(f"the operator {name} returns something that is not a tensor")
        self._check_sizes(name, results)
        given = [handle for value in (*arguments, *keywords.values()) for handle in handles_in(value)]
        for handle in given:
            self.check_fresh(handle, name)
        positional, named_ones = bound(operator, arguments, keywords)
        step = Step(
            name,
            tuple(stored(value) for value in positional),
            tuple((key, stored(value)) for key, value in named_ones),
            results,
            self.owner,
        )
        self.steps.append(step)
        needs = self.has_gradients and any(handle.needs_gradient for handle in given)
        base = given[0] if given and is_view(operator) else None
        handles = [made(step, index, needs, base) for index in range(len(step.results))]
        if isinstance(fakes, list | tuple):
            return handles
        if base is not None:
            handles[0].view = (name, tuple(arguments[1:]))
        return handles[0]

    def alias(self, handle: Handle, *, copy: bool = False) -> Handle:
        """Return a second handle for the same value: with the same memory, or with the memory of a copy."""
        self.check_fresh(handle, "alias")
        storage = TraceStorage("step") if copy else handle.storage
        view = None if copy else ("aten.alias.default", ())
        base = None if copy else handle
        return Handle(handle.reference, handle.fake, handle.needs_gradient, storage, base, view)

    def run(self, operator: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Return the operator's results on fake tensors.

        They are cached by the types of the arguments, because an unrolled cell asks the same for every
        position.
        """

        def fake(handle: Handle) -> Any:
            return handle.fake

        key = repr((operator, replaced([arguments, list(keywords.items())], _Typed)))
        if key in self.known:
            return self.known[key]
        with self.mode, torch.no_grad():
            result = operator(
                *(replaced(value, fake) for value in arguments),
                **{name: replaced(value, fake) for name, value in keywords.items()},
            )
        self.known[key] = result
        return result

    def refuse(self, reason: str) -> None:
        """Record a refusal at the current node and continue, so that all refusals are found in one pass."""
        self.refusals.append(f"{place_of_node(self.trace, self.owner)}: {reason}")

    def check_fresh(self, handle: Handle, use: str) -> None:
        """Refuse the use of a view whose memory was changed through a different handle."""
        if handle.stale is not None:
            self.refuse(
                f"{use} reads a tensor that shares memory with one that {handle.stale} "
                "changed in place; use the operator's form that is not in place there, "
                "or clone first"
            )

    # The pass

    def graph(self, graph: fx.Graph, module: fx.GraphModule, given: Sequence[Any] | None) -> list[Any]:
        """Process one graph, either the whole graph or a region's. Return what its output node names."""
        values: dict[fx.Node, Any] = {}
        arguments = iter(given or ())
        for node in graph.nodes:
            if node.op == "placeholder":
                values[node] = self._leaf(node) if given is None else next(arguments)
            elif node.op == "get_attr":
                values[node] = getattr(module, str(node.target), None)
            elif node.op == "output":
                return [self._value(value, values) for value in _flat(node.args[0])]
            else:
                owner = owner_of(node)
                self.owner = self.owner if owner is None else owner
                self.trace = node.meta.get("stack_trace")
                values[node] = self._guarded(node, values)
        return []

    def _guarded(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        try:
            return self._node(node, values)
        except CaptureRefused as refusal:
            self.refuse(str(refusal))
        except Exception as error:  # torch's operators and shape functions may raise anything
            reason = " ".join(str(error).split())[:REASON_LENGTH_MAX]
            what = name_of(node.target)
            self.refuse(f"{what} cannot be in a graph ({type(error).__name__}: {reason}); {remedy_for(what)}")
        return self._stand_in(node)

    def _stand_in(self, node: fx.Node) -> Any:
        """Return handles of the right types for a refused node, so that the pass can continue."""
        fakes = node.meta.get("val")
        if not isinstance(fakes, list | tuple):
            return self._opaque(fakes)
        return [self._opaque(fake) for fake in fakes]

    def _opaque(self, fake: Any) -> Any:
        if not isinstance(fake, torch.Tensor):
            return fake
        return made(Step("refused", (), (), (fake,), self.owner), 0, True)

    def _leaf(self, node: fx.Node) -> Any:
        fake = node.meta.get("val")
        if not isinstance(fake, torch.Tensor):
            return fake
        kind, key = self.exported.leaves[node.name]
        leaf = Leaf(kind, key)
        if leaf not in self.leaves:
            needs = kind == "parameter" and fake.requires_grad
            self.leaves[leaf] = Handle(leaf, fake, needs, TraceStorage(kind, key))
        return self.leaves[leaf]

    def _value(self, value: Any, values: Mapping[fx.Node, Any]) -> Any:
        if isinstance(value, fx.Node):
            if isinstance(size := value.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool):
                return size
            return self._seen(values[value])
        if isinstance(value, list | tuple):
            return [self._value(item, values) for item in value]
        return value

    def _seen(self, value: Any) -> Any:
        """Return a handle in the form in which a region without gradients sees it."""
        if self.has_gradients:
            return value
        return replaced(value, self._detached) if isinstance(value, Handle) else value

    def _detached(self, handle: Handle) -> Handle:
        if not handle.needs_gradient:
            return handle
        known = self.detached.get(handle)
        if known is None or known.stale is not None:
            known = self.detached[handle] = self.emit(_aten.detach.default, handle, fakes=handle.fake)
        return known

    def _node(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        operator: Any = node.target
        fakes = node.meta.get("val")
        if isinstance(fakes, torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool):
            return self._size(node, fakes)
        arguments = [self._value(value, values) for value in node.args]
        if getattr(operator, "__name__", "") == "getitem":
            return arguments[0][arguments[1]]
        if isinstance(operator, torch._ops.HigherOrderOperator):
            return self._region(str(operator), arguments)
        if not isinstance(operator, torch._ops.OpOverload):
            raise CaptureRefused(_not_an_operator(operator))
        name = name_of(operator)
        if name.startswith(("aten._assert", "aten.sym_constrain")):
            return None
        keywords = {key: self._value(value, values) for key, value in node.kwargs.items()}
        return self.apply(operator, arguments, keywords, fakes)

    def apply(self, operator: Any, arguments: list[Any], keywords: dict[str, Any], fakes: Any) -> Any:
        """Turn one operator of torch's graph into our steps."""
        name = name_of(operator)
        call = Call(self, operator, arguments, keywords, fakes)
        rewrite = REWRITES.get(name) or RECURRENT.get(name) or MEANS.get(name)
        if rewrite is not None:
            return rewrite(call)
        if operator._schema.is_mutable:
            return arguments[0] if self._is_counter(arguments) else write(call)
        return self.emit(operator, *arguments, fakes=fakes, **keywords)

    def _size(self, node: fx.Node, value: Any) -> Any:
        """Return a number that is not a tensor. It is allowed if it is computed from the inputs' sizes."""
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            unknown = [
                symbol for symbol in value.node.expr.free_symbols if symbol not in self.exported.symbols
            ]
            told = [symbol for symbol in unknown if symbol in self.unknown]
            self.unknown.update(unknown)
            if unknown and not told and not _is_only_checked(node):
                raise CaptureRefused(
                    f"{name_of(node.target)} reads a number out of a tensor, so shapes or "
                    "control flow would depend on the data; keep it a tensor, or "
                    f"{SIZED_BY_DATA}"
                )
        return value

    def _check_sizes(self, name: str, results: Sequence[Tensor]) -> None:
        """Refuse, once, an operator whose result's size depends on the data."""
        shapes: list[Any] = [side for result in results for side in result.shape]
        sides = [side for side in shapes if isinstance(side, torch.SymInt)]
        unknown = {symbol for side in sides for symbol in side.node.expr.free_symbols}
        unknown -= self.unknown | set(self.exported.symbols)
        self.unknown |= unknown
        if unknown and name in OPERATORS:  # other operators are refused already
            self.refuse(f"{name} makes a tensor whose size depends on the data; {SIZED_BY_DATA}")

    def _region(self, name: str, arguments: list[Any]) -> Any:
        """Inline the body of `with torch.no_grad()` and similar, in place of the node that contains it."""
        if name == "wrap_with_set_grad_enabled":
            enabled, body, given = bool(arguments[0]), arguments[1], arguments[2:]
        elif name == "wrap_with_autocast":
            enabled, body, given = self.has_gradients, arguments[4], arguments[5:]
            if arguments[2]:
                raise CaptureRefused(
                    "selects a precision with torch.autocast; leave that to the run's own setting"
                )
        else:
            raise CaptureRefused(f"the higher-order operator {name} cannot be in a graph")
        before, known = self.has_gradients, self.detached
        self.has_gradients, self.detached = enabled, known if before == enabled else {}
        try:
            inside = [self._seen(value) for value in given]
            return self.graph(body.graph, body, inside)
        finally:
            self.has_gradients, self.detached = before, known

    def _is_counter(self, arguments: Sequence[Any]) -> bool:
        storage = arguments[0].storage if isinstance(arguments[0], Handle) else None
        if storage is None or storage.kind != "buffer" or str(storage.key).split(".")[-1] != COUNTER:
            return False
        self.counters[str(storage.key)] = None
        return True

    def _taken_apart(self, operator: Any, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Any:
        """Return a composite operator in the form in which torch itself decomposes it; None if it is not
        composite."""
        if not isinstance(operator, torch._ops.OpOverload) or not operator.has_kernel_for_dispatch_key(
            torch._C.DispatchKey.CompositeImplicitAutograd
        ):
            return None
        recorder = _Apart(self)
        before = len(self.steps), len(self.refusals)
        fakes = [replaced(value, recorder.fake_of) for value in arguments]
        named_fakes = {key: replaced(value, recorder.fake_of) for key, value in keywords.items()}
        try:
            with self.mode, torch.no_grad(), recorder:
                results = operator.decompose(*fakes, **named_fakes)
        except CaptureRefused:
            results = NotImplemented
        if results is NotImplemented or len(self.refusals) > before[1]:
            # It is better to name the operator that the model uses than its decomposition.
            del self.steps[before[0] :], self.refusals[before[1] :]
            return None
        if isinstance(results, list | tuple):
            return [recorder.known[id(result)] for result in results]
        return recorder.known[id(results)]


class _Apart(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own has no types
    """Emits the operators that a composite operator calls."""

    def __init__(self, walk: Walk) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own has no types
        self.walk = walk
        self.known: dict[int, Handle] = {}
        self.kept: list[Any] = []

    def fake_of(self, handle: Handle) -> Any:
        # A separate tensor for each handle, because two handles may share one fake.
        fake = handle.fake.detach() if isinstance(handle.fake, FakeTensor) else handle.fake
        self.known[id(fake)] = handle
        self.kept.append(fake)
        return fake

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        if not any(isinstance(result, torch.Tensor) for result in _flat(results)):
            return results  # a query for a size, a device or a layout
        arguments = [self._handles(value) for value in args]
        keywords = {key: self._handles(value) for key, value in (kwargs or {}).items()}
        handles = self.walk.apply(func, arguments, keywords, results)
        for result, handle in zip(_flat(results), _flat(handles), strict=True):
            if isinstance(result, torch.Tensor):
                self.known[id(result)] = handle
                self.kept.append(result)
        return results

    def _handles(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self.known:
                raise CaptureRefused("torch composes this operator from others, using constants of its own")
            return self.known[id(value)]
        if isinstance(value, list | tuple):
            return [self._handles(item) for item in value]
        return value


def _is_only_checked(node: fx.Node) -> bool:
    """Return whether a number read from a tensor is used only in assertions, which a graph does not have."""
    for user in node.users:
        name = str(getattr(user.target, "__name__", user.target))
        if name.startswith(("_assert", "sym_constrain", "aten._assert", "aten.sym_constrain")):
            continue
        is_number = isinstance(user.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool | bool)
        if not is_number or not _is_only_checked(user):
            return False
    return True


def _not_an_operator(function: Any) -> str:
    """Return why a Python function in torch's graph cannot be in ours, and what to do."""
    name, module = str(getattr(function, "__name__", function)), str(getattr(function, "__module__", ""))
    if "vmap" in name or "functorch" in module or "_functorch" in repr(function) or "grad_increment" in name:
        return (
            "uses a transform of torch.func (vmap, grad), which a graph cannot "
            "contain; write it with operators over the whole batch (broadcasting, "
            "torch.einsum, torch.bmm)"
        )
    return f"calls {name}, which is not an operator; write it with operators of torch"


def is_view(operator: torch._ops.OpOverload) -> bool:
    """Return whether results may share the memory of the first argument."""
    returns = [returned.alias_info for returned in operator._schema.returns]
    return any(info is not None and not info.is_write for info in returns)


def owner_of(node: fx.Node) -> str | None:
    """Return the path of the module that called this node; None if torch does not say."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return None
    path = str(list(stack.values())[-1][0])
    return None if path.startswith("_empty_nn_module_stack") else strip(path)


def _flat(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [item for element in value for item in _flat(element)]
    return [value]
