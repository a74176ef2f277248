"""From a module to torch's own graph of it: one `torch.export` of the model with its loss and its metrics.

The export is in training mode and non-strict, and nothing is computed or allocated: while it runs, every
parameter and buffer is swapped for a fake tensor of the same shape, so models of any size work. The model is
always restored. `torch.export` runs the model's own Python code, so this runs only for the model's owner;
`clean` cleans the result and `lower` turns it into plain data.
"""

import inspect
import io
import logging
import random
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.export.graph_signature import InputKind, OutputKind

from partition.capture.ctc import traceable
from partition.capture.errors import CaptureRefused, SizesRefused
from partition.capture.module_state import changed, generator_states, restored
from partition.capture.origin import frames, named, owner, place_now, place_of
from partition.capture.steps import Kind
from partition.capture.wrapper_module import ModelExport, ResultLayout, Whole, strip

# Torch's own autograd functions that leave gradients unchanged.
_HARMLESS = {"_NoopSaveInputs"}
_SAID_LENGTH_MAX = 300
"""Maximum length of torch's own message in a quotation."""


@dataclass(frozen=True)
class ExportedGraph:
    """torch's graph of one entry point.

    `leaves` describes each placeholder: ("input", number), ("parameter", path), ("buffer", path) or
    ("constant", path); paths are the model's own. `constants` are tensors that the model made or held without
    registering them. `results` are the names of the nodes that `layout` describes; `assigned` maps buffers to
    which the model assigned a new tensor to the node that made it. `symbols` maps torch's names of sizes to
    ours. `functions` are the autograd functions whose backward passes the graph lacks.
    """

    request: ModelExport
    program: torch.export.ExportedProgram
    leaves: Mapping[str, tuple[Kind, int | str]]
    constants: Mapping[str, Tensor]
    results: tuple[str, ...]
    assigned: Mapping[str, str]
    layout: ResultLayout
    symbols: Mapping[Any, str] = field(default_factory=dict)
    functions: tuple[str, ...] = ()


def export(model: nn.Module, request: ModelExport) -> ExportedGraph:
    """Trace the model once.

    Raises:
        CaptureRefused: the model's control flow depends on data, it fixes a size that should vary, has its
            own backward pass, or cannot be traced by torch.
    """
    layout = ResultLayout()
    whole = Whole(model, request, layout)
    functions: list[str] = []
    refused: list[str] = []
    shapes = [dict[int, Any]() for _ in (*request.inputs, *request.labels)]
    sizes = _example_sizes(request)
    for dynamic in request.dynamics:
        if dynamic.minimum < dynamic.maximum:
            dimension: Any = Dim(dynamic.name, min=dynamic.minimum, max=dynamic.maximum)
            if dynamic.is_open:
                dimension = Dim.AUTO
            for port, place in dynamic.places:
                shapes[port][place] = dimension
    examples = tuple(
        torch.empty(shape, dtype=example.dtype)
        for shape, example in zip(sizes, (*request.inputs, *request.labels), strict=True)
    )
    _check_hooks(model)
    with restored(model), _watched(functions, refused, model), _drawn(refused, model), traceable(), _quiet():
        _set_mode(model, request.train)
        _swap(model)
        program = _traced(whole, examples, shapes, request, (functions, refused))
        if first := changed(*layout.states):
            # A value that forward keeps is harmless if a second call leaves it unchanged and computes the
            # same.
            whole.calls = 2
            again = _traced(whole, examples, shapes, request, (functions, refused))
            if further := changed(*layout.states[1:]):
                raise CaptureRefused(_changes(further[0], model))
            calls = _calls(program)
            if _calls(again)[-len(calls) :] != calls:
                raise CaptureRefused(_changes(first[0], model))
    if refused:
        raise CaptureRefused("\n".join(dict.fromkeys([*refused, *functions])))
    exported = _read(program, _narrowed(program, request), layout, _first_paths(model))
    return replace(exported, functions=tuple(dict.fromkeys(functions)))


def _calls(program: torch.export.ExportedProgram) -> list[str]:
    """Return the operators in order, without size queries and assertions: torch emits those only once,
    however often a model is called."""
    names = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    return [
        name
        for name in names
        if name.startswith("aten.") and not name.startswith(("aten.sym", "aten._assert"))
    ]


def _traced(
    whole: Whole,
    examples: tuple[Tensor, ...],
    shapes: Sequence[dict[int, Any]],
    request: ModelExport,
    found: tuple[Sequence[str], Sequence[str]],
) -> torch.export.ExportedProgram:
    generators = generator_states()
    try:
        # Disable gradients if nothing is trained; otherwise each node would have to record that it has none.
        with nullcontext() if request.train else torch.no_grad():
            program = torch.export.export(whole, examples, dynamic_shapes=(tuple(shapes),), strict=False)
    except CaptureRefused:
        raise
    except Exception as error:  # torch raises about twenty types here, most of them not public
        raise _explain(error, whole.model, [*found[0], *found[1]]) from error
    if generator_states() != generators and not found[1]:
        raise CaptureRefused(f"the model as a whole: {_DRAWS}")
    return program


_DRAWS = (
    "draws from Python's or numpy's random, which a graph would freeze at one "
    "value; draw with torch.rand, or switch it off (LayerDrop: layerdrop=0)"
)


def _changes(path: str, model: nn.Module) -> str:
    """Return the message about a value that `forward` changes from call to call."""
    paths = [
        name
        for name, _ in model.named_modules()
        if path == name or path.startswith(f"{name}." if name else "")
    ]
    module = max(paths, key=len, default="")
    what = path.removeprefix(module).strip(".")
    return (
        f"{named(module)}: forward changes '{what}', but a graph would keep its value "
        "from the first call. Keep it outside the model, or make it an input"
    )


def _check_hooks(model: nn.Module) -> None:
    """Refuse functions that autograd would call but no graph can carry. Raises CaptureRefused."""
    for path, parameter in model.named_parameters():
        held: Any = parameter
        if held._backward_hooks or getattr(held, "_post_accumulate_grad_hooks", None):
            raise CaptureRefused(
                f"the parameter '{path}' has a hook on its gradient, which a graph cannot carry: remove it "
                "(handle.remove()); to freeze a parameter use requires_grad_(False), to scale use the loss"
            )
    for path, module in model.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureRefused(
                f"{named(path)}: has a backward hook, which a graph cannot carry: remove it (handle.remove())"
            )


def _example_sizes(request: ModelExport) -> list[list[int]]:
    """Return shapes for the trace. Sizes that vary are at least 2 and all different; otherwise torch treats
    them as fixed or as equal."""
    shapes = [list(example.shape) for example in (*request.inputs, *request.labels)]
    used: set[int] = set()
    for dynamic in request.dynamics:
        given = {shapes[port][dimension] for port, dimension in dynamic.places}
        if len(given) != 1:
            raise CaptureRefused(f"'{dynamic.name}' has several sizes in the examples: {sorted(given)}")
        size = min(max(2, *given), dynamic.maximum)
        while size in used and size < dynamic.maximum:
            size += 1
        used.add(size)
        for port, dimension in dynamic.places:
            shapes[port][dimension] = size
    return shapes


def _set_mode(model: nn.Module, train: bool) -> None:
    # A model in training mode keeps the modes that its owner set on parts of it, such as a frozen batch norm.
    if not train or not model.training:
        model.train(train)


def _swap(model: nn.Module) -> None:
    """Put fake CPU tensors in place of parameters and buffers; tied ones share a fake."""
    fakes: dict[int, Tensor] = {}
    mode = FakeTensorMode()
    for module in model.modules():
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for table in tables:
            for name, tensor in table.items():
                if tensor is not None and id(tensor) not in fakes:
                    fakes[id(tensor)] = _fake(tensor, mode)
                table[name] = None if tensor is None else fakes[id(tensor)]


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    with mode:
        fake = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake


@contextmanager
def _watched(found: list[str], refused: list[str], model: nn.Module) -> Iterator[None]:
    """Detect every use of `torch.autograd.Function`, because torch exports its forward but drops its
    backward."""
    apply = torch.autograd.Function.__dict__["apply"]
    register_hook = Tensor.register_hook

    def watch(cls: Any, *arguments: Any, **keywords: Any) -> Any:
        if cls.__name__ not in _HARMLESS:
            frame = inspect.currentframe()
            found.append(
                f"{place_now(frame, model)}: uses the autograd function {cls.__name__}, "
                "whose own backward a graph cannot carry; write it with ordinary "
                "operators"
            )
        return apply.__get__(None, cls)(*arguments, **keywords)

    def hook(tensor: Tensor, function: Any) -> Any:
        refused.append(
            f"{place_now(inspect.currentframe(), model)}: hooks a function to a gradient, which "
            "a graph cannot carry"
        )
        return register_hook(tensor, function)  # type: ignore[no-untyped-call]  # torch's own has no types

    function: Any = torch.autograd.Function
    function.apply = classmethod(watch)
    Tensor.register_hook = hook  # type: ignore[method-assign]  # put back below
    try:
        yield
    finally:
        function.apply = apply
        Tensor.register_hook = register_hook  # type: ignore[method-assign]  # its own again


_PYTHON_DRAWS = (
    "random",
    "uniform",
    "randint",
    "randrange",
    "choice",
    "choices",
    "sample",
    "shuffle",
    "gauss",
)
_NUMPY_DRAWS = ("rand", "randn", "random", "randint", "uniform", "normal", "choice", "permutation", "shuffle")


@contextmanager
def _drawn(found: list[str], model: nn.Module) -> Iterator[None]:
    """Detect draws from the generators of Python and numpy, because these change the generators' states."""
    places = [(random, name) for name in _PYTHON_DRAWS]
    places += [(np.random, name) for name in _NUMPY_DRAWS]
    kept = [(place, name, getattr(place, name)) for place, name in places]

    def noticed(draw: Any) -> Any:
        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            frame = inspect.currentframe()
            if owner(frames(frame), model) is not None:
                found.append(f"{place_now(frame, model)}: {_DRAWS}")
            return draw(*arguments, **keywords)

        return wrapped

    try:
        for place, name, draw in kept:
            setattr(place, name, noticed(draw))
        yield
    finally:
        for place, name, draw in kept:
            setattr(place, name, draw)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's warnings, logs and prints while it traces. Problems are reported as exceptions."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


_ADVERTISED = re.compile(
    r"\(unhinted|\(Size-like|For more information|For C\+\+ stack|User Stack|Suggested fixes|You can try|"
    r"The following call|is not ?tracked with proxy|object at 0x|The error above|To fix the error|Caused by|"
    r"consider using data-dependent|torch\._check|https?://"
)
"""The beginning of torch's own advice: switches for its logs, web pages, its internals."""
_TOPICS = (
    (
        re.compile(r"DataDependent|data-dependent|Unbacked|unbacked|is not iterable over"),
        (
            "control flow or a shape depends on the data, which a graph cannot express; "
            "use torch.where or a mask, and leave out code that checks values first (`if "
            "mask.any()`, an assertion)"
        ),
    ),
    (
        re.compile(r"Constraint|Constraints violated|UserError"),
        "fixes or restricts a size that should vary (as len() does); change it or `dynamic`",
    ),
    (
        re.compile(r"nested|NestedTensor|jagged"),
        "uses nested tensors, which a graph cannot contain; pad to one length and pass a mask",
    ),
    (
        re.compile(r"not tracked with proxy|aten::_local_scalar_dense"),
        "takes a tensor apart in a way that cannot be traced; use operators on whole tensors",
    ),
    (
        re.compile(r"SparseTensor|[Ss]parse"),
        "uses sparse tensors, which a graph cannot contain; use dense ones (sparse=False)",
    ),
)


def _explain(error: Exception, model: nn.Module, functions: Sequence[str]) -> CaptureRefused:
    kind, text = type(error).__name__, str(error).strip()
    points = list(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip().startswith("- ")))
    said = " ".join(" ".join(points or [text]).split())
    if found := _ADVERTISED.search(said):
        said = said[: found.start()]
    said = said.strip(" .:")[:_SAID_LENGTH_MAX]
    known = (advice for pattern, advice in _TOPICS if pattern.search(f"{kind} {text}"))
    advice = next(known, f"raises {kind} when it is traced with unknown values")
    if "fixes or restricts" in advice and any(isinstance(module, nn.RNNBase) for module in model.modules()):
        advice += " (recurrent layers are unrolled, so their sequence length must be fixed)"
    lines = [f"{place_of(error, model)}: {advice}{': ' if said else ''}{said}", *dict.fromkeys(functions)]
    return CaptureRefused("\n".join(lines)) if functions else SizesRefused(lines[0])


def _first_paths(model: nn.Module) -> dict[str, str]:
    """Return, for the path of every parameter and buffer, the first path of the same tensor."""
    tensors = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    paths: dict[int, str] = {}
    return {path: paths.setdefault(id(tensor), path) for path, tensor in tensors}


def _read(
    program: torch.export.ExportedProgram,
    request: ModelExport,
    layout: ResultLayout,
    first: Mapping[str, str],
) -> ExportedGraph:
    leaves: dict[str, tuple[Kind, int | str]] = {}
    constants: dict[str, Tensor] = {}
    inputs: list[str] = []
    for spec in program.graph_signature.input_specs:
        name, target = spec.arg.name, strip(spec.target or "")
        match spec.kind:
            case InputKind.USER_INPUT:
                leaves[name] = ("input", len(inputs))
                inputs.append(name)
            case InputKind.PARAMETER:
                if target not in first:
                    raise CaptureRefused(
                        f"the loss has a parameter, '{target}'. Make it a parameter of the model"
                    )
                leaves[name] = ("parameter", first[target])
            case InputKind.BUFFER if target != spec.target:
                leaves[name] = ("buffer", first[target])
            case InputKind.BUFFER:  # a buffer of the loss, such as the weights of its classes
                leaves[name] = ("constant", target)
                constants[target] = (program.state_dict | program.constants)[target]
            case InputKind.CONSTANT_TENSOR:
                if target in layout.attributes:
                    raise CaptureRefused(f"'{target}' is kept for the next call: register it as a buffer")
                leaves[name] = ("constant", target)
                constants[target] = program.constants[spec.target or ""]
            case _:
                raise CaptureRefused(f"the model holds '{target}', which is not a tensor: {spec.kind.name}")
    results = []
    for output in program.graph_signature.output_specs:
        if output.kind != OutputKind.USER_OUTPUT:
            raise CaptureRefused(f"the model changes '{output.target}': {output.kind.name}")
        results.append(output.arg.name)
    count = len(results) - len(layout.assigned)
    return ExportedGraph(
        request,
        program,
        leaves,
        constants,
        tuple(results[:count]),
        {first[path]: name for path, name in zip(layout.assigned, results[count:], strict=True)},
        layout,
        _symbols(program, request, inputs),
    )


def _narrowed(program: torch.export.ExportedProgram, request: ModelExport) -> ModelExport:
    """Return the request with the bounds that torch found for open sizes.

    Raises:
        SizesRefused: torch has fixed an open size, or derived it from a different one.
    """
    if not any(dynamic.is_open for dynamic in request.dynamics):
        return request
    names = [
        spec.arg.name for spec in program.graph_signature.input_specs if spec.kind == InputKind.USER_INPUT
    ]
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    found = []
    for dynamic in request.dynamics:
        minimum, maximum = dynamic.minimum, dynamic.maximum
        for port, dimension in dynamic.places if dynamic.is_open else ():
            value: Any = values[names[port]]
            side = value.shape[dimension]
            if isinstance(side, int) or not side.node.expr.is_Symbol:
                raise SizesRefused(f"the model fixes '{dynamic.name}' to {side}: it cannot vary")
            bounds = program.range_constraints[side.node.expr]
            minimum = max(minimum, int(bounds.lower))
            maximum = int(min(maximum, bounds.upper))
        found.append(replace(dynamic, minimum=minimum, maximum=maximum))
    return replace(request, dynamics=tuple(found))


def _symbols(
    program: torch.export.ExportedProgram, request: ModelExport, inputs: Sequence[str]
) -> dict[Any, str]:
    """Return the caller's names for torch's symbols. Raises CaptureRefused if torch has fixed a size."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    symbols: dict[Any, str] = {}
    for dynamic in request.dynamics:
        if dynamic.minimum == dynamic.maximum:
            continue
        for port, dimension in dynamic.places:
            value: Any = values[inputs[port]]
            side = value.shape[dimension]
            if isinstance(side, int) or not side.node.expr.is_Symbol:
                raise SizesRefused(f"the model fixes '{dynamic.name}' to {side}: it cannot vary")
            symbols[side.node.expr] = dynamic.name
    return symbols
