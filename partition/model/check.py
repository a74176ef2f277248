"""Validation of an unknown peer's graph: ids, tables, layers, states, recipes. No torch.

`decode_graph` has checked the form of each part; this file checks that the parts fit together, in time linear
in the graph's bytes and without building anything. After this check

- every id and row refers to something that exists, values are numbered densely and used only after they are
  made;
- every operator is in `OPERATORS`;
- sizes can be evaluated at the smallest and at the largest inputs, and no tensor claims more than 2^53 bytes;
- parameters and constants have fixed shapes, and constants exactly the bytes that their shapes require;
- nothing before the last boundary depends on a label;
- only batch norm reads batch statistics, and states change only through `updates`.

Not here: whether arguments suit their operators, and their cost; `partition.execute.admit` checks that in the
stage's process.
"""

from collections.abc import Iterable, Sequence
from math import isfinite, isnan

from crypto.errors import RemoteProtocolError
from partition.model.graph import (
    EVALUATE,
    FLOATING,
    GRAPH_VERSION,
    ITEM_BYTES,
    NODES_MAX,
    PAIRS,
    TRAIN,
    Argument,
    ConstantValue,
    Entry,
    Expression,
    Graph,
    GraphNode,
    Parameter,
    ParameterValue,
    Recipe,
    Reference,
    Size,
    StateValue,
    Symbol,
    TensorType,
    Value,
    arguments_of,
    version_for,
)
from partition.model.operators import BATCH_NORM, OPERATORS
from partition.model.serving import check_serve
from partition.model.sizes import evaluate, shape_of

TENSOR_BYTES_MAX = 2**53
"""Maximum number of bytes that one tensor may claim: every language counts it exactly. Admission limits the
real size."""
PARAMETER_BYTES_MAX = 1 << 34
"""Maximum size of a parameter, which must fit into one stage's arena: 16 GiB."""
PARAMETERS_BYTES_MAX = 2**53
METRICS_MAX = 16
"""Maximum number of metrics: what a stage's answer can carry in addition to the loss."""

METADATA = "__metadata__"
INSTANCE_NORM = "aten.instance_norm.default"
_STATISTICS = (3, 4)
"""The positions of the running mean and variance among the arguments of both norms."""
_TRAINING, _MOMENTUM = 5, 6


def check_graph(graph: Graph) -> None:
    """Check a graph. Raises RemoteProtocolError, with the place and the reason, if it cannot be run."""
    _check_sizes(graph)
    _check_operators(graph.operators)
    _check_parameters(graph.parameters)
    _check_parameter_types(graph)
    _check_constants(graph)
    _check_state_names(graph)
    _unique("entry point", (entry.name for entry in graph.entries))
    if sum(len(entry.nodes) for entry in graph.entries) > NODES_MAX:
        # A cut examines all nodes, which takes some seconds for this many.
        raise _refuse(f"entry points together have more than {NODES_MAX} nodes")
    for entry in graph.entries:
        _check_entry(graph, entry)


def _refuse(reason: str) -> RemoteProtocolError:
    return RemoteProtocolError(f"a graph in which {reason}")


def _unique(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if not name:
            raise _refuse(f"one {what} has no name")
        if name in seen:
            raise _refuse(f"the name '{name}' occurs twice ({what})")
        seen.add(name)


# Sizes and types


def _check_sizes(graph: Graph) -> None:
    if not graph.symbols:
        raise _refuse("no size varies, but the batch size must")
    _unique("symbol", (symbol.name for symbol in graph.symbols))
    for symbol in graph.symbols:
        if symbol.minimum > symbol.maximum:
            raise _refuse(f"{symbol.name} is from {symbol.minimum} to {symbol.maximum}")
    _check_expressions(graph.expressions, graph.symbols)
    for sizes in (
        tuple(symbol.minimum for symbol in graph.symbols),
        tuple(symbol.maximum for symbol in graph.symbols),
    ):
        values = evaluate(graph.expressions, sizes)
        for row, kind in enumerate((*graph.types, *(state.type for state in graph.states))):
            where = f"type {row}" if row < len(graph.types) else f"state {row - len(graph.types)}"
            if any(isinstance(side, Size) and side.row >= len(values) for side in kind.shape):
                raise _refuse(f"{where} has a side that is not a size")
            if _claimed_bytes(kind, values) > TENSOR_BYTES_MAX:
                raise _refuse(f"{where} takes more than {TENSOR_BYTES_MAX} bytes")


def _check_expressions(expressions: Sequence[Expression], symbols: Sequence[Symbol]) -> None:
    """Check that the first rows are the symbols, in order, and that no later row is a symbol. `evaluate`
    checks that rows refer only to earlier rows."""
    if len(expressions) < len(symbols):
        raise _refuse("a symbol has no row among the sizes")
    for row, expression in enumerate(expressions):
        if row < len(symbols):
            if expression != Expression("symbol", row):
                raise _refuse(f"size {row} is not symbol {row}")
        elif expression.operator == "symbol":
            raise _refuse(f"size {row} is a second row for a symbol")


def _claimed_bytes(kind: TensorType, values: Sequence[int]) -> int:
    """Return the bytes of a type, counting a side of 0 as 1, because a loop over the other sides runs
    anyway."""
    total = ITEM_BYTES[kind.dtype]
    for side in shape_of(kind, values):
        # There are at most eight sides, each below 2**63, so this integer stays small.
        total *= max(side, 1)
    return total


def _fixed_bytes(kind: TensorType, where: str) -> int:
    """Return the bytes of a type of fixed shape."""
    if any(isinstance(side, Size) for side in kind.shape):
        raise _refuse(f"{where} has a shape that varies")
    return 0 if 0 in kind.shape else _claimed_bytes(kind, ())


def _check_operators(operators: Sequence[str]) -> None:
    for name in operators:
        if name not in OPERATORS:
            raise _refuse(f"the operator {name} is used, but it is not allowed")
    _unique("operator", operators)


# Parameters, constants, states


def _check_parameters(parameters: Sequence[Parameter]) -> None:
    total = stored_until = 0
    for row, parameter in enumerate(parameters):
        where = f"parameter {row}"
        size = _fixed_bytes(parameter.type, where)
        total += size
        if not size:
            raise _refuse(f"{where} has no elements")
        if size > PARAMETER_BYTES_MAX or total > PARAMETERS_BYTES_MAX:
            raise _refuse(f"{where} takes {size} bytes, of {total} so far")
        if parameter.type.dtype not in FLOATING:
            raise _refuse(
                f"{where} is {parameter.type.dtype}, but parameters must have a floating-point type"
            )
        if parameter.kind == "statistic" and len(parameter.type.shape) != 1:
            raise _refuse(f"{where} is a statistic with {len(parameter.type.shape)} dimensions")
        if isinstance(parameter.source, Recipe):
            _check_recipe(parameter.source, parameter.type.shape, where)
            continue
        kept = parameter.stored_bytes
        if parameter.source.length != kept:
            raise _refuse(f"{where} takes {kept} bytes, but {parameter.source.length} are stored")
        if parameter.source.offset < stored_until:
            raise _refuse(f"{where} is stored at the same place as an earlier one")
        stored_until = parameter.source.offset + kept


def _check_parameter_types(graph: Graph) -> None:
    """Check that trained parameters have one type, because gradients, their sums and the optimizer's moments
    are vectors.

    Checkpoints and members in local mode treat a training stage as one vector. So a graph with parameters of
    several types does not train at all.
    """
    wanted = version_for(graph.parameters)
    if wanted != graph.version:
        found = ", ".join(sorted({row.type.dtype for row in graph.parameters}))
        if graph.version == GRAPH_VERSION:
            raise _refuse(
                f"parameters are {found}, but version {GRAPH_VERSION} has all float32 or all float64"
            )
        raise _refuse(f"parameters are {found or 'none'}, which needs version {wanted}, not {graph.version}")
    if graph.version == GRAPH_VERSION:
        return
    trains = any(entry.loss is not None for entry in graph.entries)
    for row in graph.parameters:
        if trains or row.kind != "frozen":
            part = "part of what is trained" if trains else "trained"
            raise _refuse(
                f"'{row.names[0]}' is {row.type.dtype} and {part}, but trained parameters "
                "must be all float32 or all float64"
            )


def _check_recipe(recipe: Recipe, shape: Sequence[int | Size], where: str) -> None:
    # Sides are integers here, as `_fixed_bytes` has checked.
    rows = shape[0] if shape and isinstance(shape[0], int) else 0
    for step in recipe.steps:
        sensible = isfinite(step.first) and isfinite(step.second)
        match step.kind:
            case "uniform":
                sensible = sensible and step.first <= step.second and isfinite(step.second - step.first)
            case "normal":
                sensible = sensible and step.second >= 0
            case "clamp":
                # One side may be open.
                sensible = step.first <= step.second
            case "zero_row":
                sensible = sensible and step.first == int(step.first) and 0 <= step.first < rows
            case _:
                pass
        if not sensible:
            raise _refuse(f"the recipe of {where} has an invalid step '{step.kind}'")


def _check_constants(graph: Graph) -> None:
    for row, constant in enumerate(graph.constants):
        size = _fixed_bytes(constant.type, f"constant {row}")
        if constant.names and constant.type.dtype in PAIRS:
            raise _refuse(
                f"constant {row} is complex and in the state dict, but safetensors "
                "files cannot hold complex tensors"
            )
        if len(constant.data) != size:
            raise _refuse(f"constant {row} has {len(constant.data)} bytes, but {size} are expected")
        # torch reads a bool as its byte, and treats a byte of 2 neither as true nor as false.
        if constant.type.dtype == "bool" and constant.data.translate(None, b"\x00\x01"):
            raise _refuse(f"constant {row} is bool but has bytes other than 0 and 1")


def _check_state_names(graph: Graph) -> None:
    """Check that all names in the state dict differ, including those of tied parameters, and that states'
    names differ."""
    parameters = (name for parameter in graph.parameters for name in parameter.names)
    constants = (name for constant in graph.constants for name in constant.names)
    names = (*parameters, *constants, *graph.counters)
    _unique("tensor", names)
    if METADATA in names:
        raise _refuse(f"a tensor has the name '{METADATA}', which safetensors reserves")
    _unique("state", (state.name for state in graph.states))


# Entry points


def _check_entry(graph: Graph, entry: Entry) -> None:
    where = f"entry point '{entry.name}'"
    ports = (*entry.inputs, *entry.labels)
    _unique(f"inputs and labels of {where}", (port.name for port in ports))
    _check_types(graph, entry, where)
    if (entry.name in (TRAIN, EVALUATE)) != (entry.loss is not None):
        raise _refuse(
            f"{where} has {'a' if entry.loss is not None else 'no'} loss, but exactly "
            f"'{TRAIN}' and '{EVALUATE}' must have one"
        )
    if entry.name == EVALUATE:
        _check_twins(graph, entry)
    if entry.loss is None and (entry.labels or entry.metrics or entry.count is not None or not entry.outputs):
        raise _refuse(f"{where} has labels, a count or metrics without a loss, or no outputs")
    if entry.loss is not None and entry.updates:
        raise _refuse(f"{where} updates a state, but a graph that trains must not have states")
    _check_boundaries(graph, entry, where)
    _check_nodes(graph, entry, where)
    _check_results(graph, entry, where)
    check_serve(graph, entry)
    if entry.loss is not None:
        _check_statistics(graph, entry, where)


def _check_twins(graph: Graph, entry: Entry) -> None:
    """Check that both entry points take the same data and return the same metrics."""
    first = graph.entries[0]
    told = [[(metric.name) for metric in each.metrics] for each in (first, entry)]
    if first.name != TRAIN or (first.inputs, first.labels) != (entry.inputs, entry.labels):
        raise _refuse(f"'{EVALUATE}' has inputs that differ from those of '{TRAIN}'")
    if told[0] != told[1] or (first.count is None) != (entry.count is None):
        raise _refuse(f"'{EVALUATE}' has metrics that differ from those of '{TRAIN}'")


def _check_types(graph: Graph, entry: Entry, where: str) -> None:
    for number, row in enumerate(entry.types):
        if row >= len(graph.types):
            raise _refuse(f"value {number} of {where} has no type")
    ports = (*entry.inputs, *entry.labels)
    values = len(ports) + sum(len(node.outputs) for node in entry.nodes)
    if len(entry.types) != values:
        raise _refuse(f"{where} has {values} values, but types for {len(entry.types)}")
    for number, port in enumerate(ports):
        if entry.types[number] != port.type:
            raise _refuse(f"'{port.name}' of {where} has two types")


def _check_boundaries(graph: Graph, entry: Entry, where: str) -> None:
    """Check that in the first entry point each layer has nodes; in the others a layer may be empty."""
    if len(entry.boundaries) != len(graph.layers) - 1:
        raise _refuse(f"{where} has {len(entry.boundaries)} boundaries between {len(graph.layers)} layers")
    is_first = entry is graph.entries[0]
    last = 0 if is_first else -1
    for boundary in entry.boundaries:
        ascends = boundary > last if is_first else boundary >= last
        if not ascends or boundary > len(entry.nodes) - is_first:
            raise _refuse(f"{where} has a boundary at {boundary}, after {last}, of {len(entry.nodes)} nodes")
        last = boundary


def _check_nodes(graph: Graph, entry: Entry, where: str) -> None:
    made = len(entry.inputs) + len(entry.labels)
    told = bytearray(len(entry.types))
    """Whether a value depends on a label."""
    told[len(entry.inputs) : made] = b"\x01" * len(entry.labels)
    last = entry.boundaries[-1] if entry.boundaries else 0
    for index, node in enumerate(entry.nodes):
        place = f"node {index} of {where}"
        if node.id != index:
            raise _refuse(f"{place} is called {node.id}")
        if node.operator >= len(graph.operators) or node.owner >= len(graph.owners):
            raise _refuse(f"{place} has an operator or an owner that is not in its table")
        if not node.outputs:
            raise _refuse(f"{place} makes nothing")
        is_told = _check_arguments(graph, node, made, told, place)
        if is_told and index < last:
            raise _refuse(f"{place} needs a label before the last layer")
        for number in node.outputs:
            if number != made:
                raise _refuse(f"{place} makes value {number}, but {made} is the next")
            told[made] = is_told
            made += 1


def _check_arguments(graph: Graph, node: GraphNode, made: int, told: bytearray, place: str) -> bool:
    """Return whether one of a node's arguments depends on a label."""
    name = graph.operators[node.operator]
    _unique(f"keywords of {place}", (key for key, _ in node.keywords))
    is_norm = name in (BATCH_NORM, INSTANCE_NORM)
    if is_norm:
        _check_norm(graph, node, place)
    is_told = False
    for argument in arguments_of(node):
        if isinstance(argument, Value):
            if argument.id >= made:
                raise _refuse(f"{place} takes value {argument.id} before it is made")
            is_told = is_told or bool(told[argument.id])
        elif isinstance(argument, Reference):
            _check_reference(graph, argument, place)
            if not is_norm and _is_statistic(graph, argument):
                raise _refuse(f"{place} reads a batch statistic but is not a batch norm")
        elif isinstance(argument, float) and isnan(argument):
            raise _refuse(f"{place} has an argument that is not a number")
    return is_told


def _check_reference(graph: Graph, argument: Reference, place: str) -> None:
    match argument:
        case Size(row):
            table, rows = "sizes", len(graph.expressions)
        case ParameterValue(row):
            table, rows = "parameters", len(graph.parameters)
        case ConstantValue(row):
            table, rows = "constants", len(graph.constants)
        case StateValue(row):
            table, rows = "states", len(graph.states)
        case _:
            return
    if row >= rows:
        raise _refuse(f"{place} takes row {row} of {rows} {table}")


def _is_statistic(graph: Graph, argument: object) -> bool:
    return (
        isinstance(argument, ParameterValue)
        and argument.row < len(graph.parameters)
        and graph.parameters[argument.row].kind == "statistic"
    )


def _check_norm(graph: Graph, node: GraphNode, place: str) -> None:
    """Check that running statistics come in pairs of rows, and that only batch norm changes them.

    Both norms would change their statistics in place. The interpreter never lets them, but it must be able to
    tell which rows to change when the step commits.
    """
    if len(node.arguments) <= _TRAINING:
        raise _refuse(f"{place} lacks arguments")
    for index, argument in enumerate((*node.arguments, *(value for _, value in node.keywords))):
        if index not in _STATISTICS and _is_statistic(graph, argument):
            raise _refuse(f"{place} reads a batch statistic as a different argument")
    mean, variance = (node.arguments[index] for index in _STATISTICS)
    if mean is None and variance is None:
        return
    if graph.operators[node.operator] == INSTANCE_NORM:
        raise _refuse(f"{place} is an instance norm that keeps statistics")
    if node.arguments[_TRAINING] is False:
        return
    if not (_is_statistic(graph, mean) and _is_statistic(graph, variance)) or mean == variance:
        raise _refuse(f"{place} updates rows that are not a pair of batch statistics")


def _check_statistics(graph: Graph, entry: Entry, where: str) -> None:
    """Check that all norms that update the same statistics do so in the same way, because each knows only how
    many norms there are."""
    known: dict[int, tuple[Argument, ...]] = {}
    for index, node in enumerate(entry.nodes):
        if graph.operators[node.operator] != BATCH_NORM or node.arguments[_TRAINING] is False:
            continue
        how = node.arguments[_STATISTICS[0] : _STATISTICS[-1] + 1] + node.arguments[_MOMENTUM : _MOMENTUM + 1]
        for statistic in how[:2]:
            if isinstance(statistic, ParameterValue) and known.setdefault(statistic.row, how) != how:
                raise _refuse(
                    f"node {index} of {where} updates batch statistics differently from an earlier node"
                )


# Results of an entry point


def _check_results(graph: Graph, entry: Entry, where: str) -> None:
    def kind(number: int, what: str) -> TensorType:
        if number >= len(entry.types):
            raise _refuse(f"{what} of {where} is not a value")
        return graph.types[entry.types[number]]

    for number in entry.outputs:
        kind(number, "an output")
    if len(set(entry.outputs)) != len(entry.outputs):
        raise _refuse(f"{where} has an output twice")
    if entry.loss is not None:
        loss = kind(entry.loss, "the loss")
        if loss.shape or loss.dtype not in ("float32", "float64"):
            raise _refuse(f"the loss of {where} is not a scalar of float32 or float64")
        if entry.loss < len(entry.inputs) + len(entry.labels):
            raise _refuse(f"the loss of {where} is not computed")
    if len(entry.metrics) > METRICS_MAX:
        raise _refuse(f"{where} has {len(entry.metrics)} metrics, at most {METRICS_MAX} allowed")
    _unique(f"metrics of {where}", (metric.name for metric in entry.metrics))
    scalars = [metric.value for metric in entry.metrics] + ([] if entry.count is None else [entry.count])
    for number in scalars:
        if kind(number, "a metric or the count").shape:
            raise _refuse(f"a metric or the count of {where} is not a scalar")
    _check_updates(graph, entry, where)


def _check_updates(graph: Graph, entry: Entry, where: str) -> None:
    states: set[int] = set()
    values: set[int] = set()
    for row, number in entry.updates:
        if row >= len(graph.states) or number >= len(entry.types):
            raise _refuse(f"{where} updates a state that does not exist, or by a value that does not exist")
        if row in states or number in values:
            raise _refuse(f"{where} updates a state twice, or two states by one value")
        states.add(row)
        values.add(number)
        if graph.types[entry.types[number]] != graph.states[row].type:
            raise _refuse(f"{where} gives state '{graph.states[row].name}' a value of a different type")
