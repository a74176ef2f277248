"""The graph format: a model as data that anyone can check before anything is computed. No torch.

A graph is one table of parameters, constants and states, and *entry points* over it (`train`, later
`decode`), each a list of nodes in the order in which they run. A node has the exact overload of an ATen
operator (`aten.addmm.default`), its arguments as plain data, and the integer ids of the values it makes.
Nothing in a graph is source code, a pickle or an expression to be parsed.

- Every operator is functional: a value is made once and never changed. A tensor that a model changes in place
  (a KV cache) is a `state`, whose new value an entry point names in `updates`.
- An operator with several results makes several values, so no value is a tuple.
- Sizes that vary (batch, sequence) are symbols; integers computed from them are rows of one table.
- One graph serves training and evaluation: `partition.model.operators` says which arguments differ. If that
  is not enough (noise, dropped paths), there is an entry point `evaluate` in addition to `train`.
- `layers` are the stretches between the boundaries at which a plan may cut, each named after the owner of its
  first parameter. Every entry point has the same layers.

A graph has exactly one encoding, and its BLAKE3 hash is its name. This file defines the structs and
`decode_graph`; `partition.model.check` validates ids, sizes and operators, and `partition.execute.admit`
compares them with torch.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Annotated, Literal

import msgspec
from blake3 import blake3

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError

GRAPH_VERSION = 1
"""All parameters are float32, or all are float64. Bytes and hashes of such graphs never change."""
TYPED_GRAPH_VERSION = 2
"""Each parameter has its own type, which may have half precision, and is frozen: such a graph does not train.
A graph that version 1 can express has version 1."""
GRAPH_BYTES_MAX = 64 * 1024 * 1024
"""Maximum size. A Llama of 8B takes about one MB; a causal mask, which is a constant, may take 4 MB."""
STRUCTURE_BYTES_MAX = 8 * 1024 * 1024
"""Maximum size without the bytes of constants. A byte of hostile structure becomes up to 30 in Python; a byte
of data stays one."""
NODES_MAX = 65_536
PARAMETERS_MAX = 65_536
TABLE_MAX = 65_536
"""Maximum number of rows in the tables of types, expressions, constants, owners."""
ENTRIES_MAX = 8
SYMBOLS_MAX = 8
PORTS_MAX = 64
TENSORS_MAX = 64
"""Maximum number of tensors in one bundle, across one cut. A U-Net cut in its middle has five."""
LAYERS_MAX = 512
"""Maximum number of layers; the solver's time grows with their square."""
ARGUMENTS_MAX = 64
ITEMS_MAX = 1_024
"""Maximum length of a list argument: the tensors that a `cat` joins, or the sizes of a view."""
DIMENSIONS_MAX = 8
RECIPE_STEPS_MAX = 16
NAMES_MAX = 64
"""Maximum number of state-dict names of one parameter; tied weights have several."""
INTEGER_MAX = 2**63 - 1
TEXT_LENGTH_MAX = 32
NAME_LENGTH_MAX = 256

RealType = Literal[
    "float64", "float32", "bfloat16", "float16", "int64", "int32", "int16", "int8", "uint8", "bool"
]
"""Types that can be sent."""
DataType = Literal[RealType, "complex64", "complex128"]
ITEM_BYTES: dict[DataType, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}
FLOATING: tuple[DataType, ...] = ("float64", "float32", "bfloat16", "float16")
TRAINED: tuple[DataType, ...] = ("float64", "float32")
"""Types in which gradients are summed and optimizers step."""
PAIRS: dict[DataType, DataType] = {"complex64": "float32", "complex128": "float64"}
"""Complex types, and the types of their parts: they are sent as pairs, with one more side of two."""

TRAIN, EVALUATE = "train", "evaluate"
"""The entry point that is trained, and the one that evaluates held-out samples if changed arguments are not
enough."""

SERVE = "serve"
"""The entry point that continues sessions: it has no loss, and the inputs SERVE_INPUTS."""
SERVE_INPUTS = ("tokens", "positions", "rows")
"""Token ids, flat over all sessions of a batch; the position of each in its session; and the rows that are
answered with logits. All int64; a stage computes the last two itself."""
SERVE_SYMBOLS = ("tokens", "rows", "context")
"""The number of tokens and of rows, and the maximum length of a session, which is in no shape."""

Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.+/:@-]{0,256}\Z")]
"""A state-dict key, a module's path, an input's name: printable, so that a screen can show it."""
OperatorName = Annotated[str, msgspec.Meta(pattern=r"^[a-z][A-Za-z0-9_]{0,63}(\.[A-Za-z0-9_]{1,64}){2}\Z")]
Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=INTEGER_MAX)]
Index = Annotated[int, msgspec.Meta(ge=0, lt=2**24)]
Text = Annotated[str, msgspec.Meta(max_length=TEXT_LENGTH_MAX)]


class Size(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """An integer that depends on the sizes of the inputs: a row of `Graph.expressions`."""

    row: Index


class Value(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A tensor of this entry point by id: inputs, then labels, then the values that nodes make, in order."""

    id: Index


class ParameterValue(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A row of `Graph.parameters`."""

    row: Index


class ConstantValue(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A row of `Graph.constants`."""

    row: Index


class StateValue(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A row of `Graph.states`, as it was when the entry point began."""

    row: Index


class TypeName(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """A dtype argument."""

    dtype: DataType


class FormatName(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """A memory-format argument. channels_last only makes the sender's machine faster, so it is not sent."""

    format: Literal["contiguous", "preserve"]


Reference = Size | Value | ParameterValue | ConstantValue | StateValue | TypeName | FormatName
Scalar = None | bool | Integer | float | Text
Item = Scalar | Reference


class Items(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """A list argument. Lists do not nest: no allow-listed operator takes a list of lists."""

    items: Annotated[tuple[Item, ...], msgspec.Meta(max_length=ITEMS_MAX)]


Argument = Scalar | Reference | Items


class Symbol(msgspec.Struct, frozen=True, array_like=True):
    """A size that differs between micro-batches, with its inclusive bounds. The first symbol is the batch
    size."""

    name: Name
    minimum: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]
    maximum: Annotated[int, msgspec.Meta(ge=1, lt=2**31)]


class Expression(msgspec.Struct, frozen=True, array_like=True):
    """One integer operation. The first rows of the table are the symbols themselves (`symbol`, left their
    row).

    `Size` operands refer to earlier rows only. Division and remainder round down, as in Python.
    """

    operator: Literal["symbol", "add", "sub", "mul", "floordiv", "mod", "min", "max"]
    left: Integer | Size
    right: Integer | Size = 0


class TensorType(msgspec.Struct, frozen=True, array_like=True):
    """dtype and shape; a `Size` stands for a side that varies."""

    dtype: DataType
    shape: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0, le=2**40)] | Size, ...],
        msgspec.Meta(max_length=DIMENSIONS_MAX),
    ]


class FillStep(msgspec.Struct, frozen=True, array_like=True):
    """One step of a recipe, over the whole parameter: an operation of `torch.nn.init`, as data.

    `uniform` (low, high) and `normal` (mean, deviation) draw; `constant` sets; `multiply`, `add`, `clamp`
    (low, high) and `erfinv` change the current values; `zero_row` zeroes one row (a padding index).
    """

    kind: Literal["uniform", "normal", "constant", "multiply", "add", "clamp", "erfinv", "zero_row"]
    first: float = 0.0
    second: float = 0.0


class Recipe(msgspec.Struct, frozen=True, array_like=True, tag="recipe"):
    """First values that are drawn where they are needed, from a seed per parameter *name*."""

    steps: Annotated[tuple[FillStep, ...], msgspec.Meta(max_length=RECIPE_STEPS_MAX)]


class StoredValues(msgspec.Struct, frozen=True, array_like=True, tag="stored"):
    """First values in the safetensors file that accompanies the graph: `length` bytes at `offset` in its
    data.

    `digest` is BLAKE3 of those bytes, so that a range can be checked separately.
    """

    offset: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
    length: Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
    digest: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]


class Parameter(msgspec.Struct, frozen=True, array_like=True):
    """One row of the parameter table, in the order of first use in the first entry point.

    `names` are its keys in the model's state dict; tied weights have several. `kind`: a `parameter` gets a
    gradient, a `frozen` one does not, a `statistic` (batch norm's running mean and variance) is updated by
    the micro-batches' statistics when a step commits, and counts as untrainable. `group` is the optimizer's
    group. `type` is the type that operators see, `storage` the form of its values in files and arenas;
    `plain` means the same form.
    """

    names: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1, max_length=NAMES_MAX)]
    type: TensorType
    kind: Literal["parameter", "frozen", "statistic"]
    source: Recipe | StoredValues
    group: Annotated[int, msgspec.Meta(ge=0, lt=64)] = 0
    storage: Literal["plain"] = "plain"

    @property
    def plain_bytes(self) -> int:
        """Return the size of its values as operators see them. Its shape is fixed."""
        return prod(side for side in self.type.shape if isinstance(side, int)) * ITEM_BYTES[self.type.dtype]

    @property
    def stored_bytes(self) -> int:
        """Return the size of its values in files and in an arena."""
        return self.plain_bytes


class Constant(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that nothing changes: little-endian bytes in C order. `names` are like a parameter's; () if
    unnamed."""

    names: Annotated[tuple[Name, ...], msgspec.Meta(max_length=NAMES_MAX)]
    type: TensorType
    data: bytes


class GraphState(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that is kept per session and changed by entry points, initially zero: a KV cache."""

    name: Name
    type: TensorType


class Port(msgspec.Struct, frozen=True, array_like=True):
    """An input or label of an entry point; its value id is its position among inputs and labels."""

    name: Name
    type: Index


class GraphNode(msgspec.Struct, frozen=True, array_like=True):
    """One application of an operator.

    `id` is its position in the entry point before any cut, which seeds a random operator. `arguments` are in
    the schema's order without trailing defaults; `keywords` are the keyword-only ones, by name. `outputs` has
    one value id for each result. `owner` is the module that called it.
    """

    id: Index
    operator: Index
    arguments: Annotated[tuple[Argument, ...], msgspec.Meta(max_length=ARGUMENTS_MAX)]
    keywords: Annotated[tuple[tuple[Text, Argument], ...], msgspec.Meta(max_length=ARGUMENTS_MAX)]
    outputs: Annotated[tuple[Index, ...], msgspec.Meta(max_length=ITEMS_MAX)]
    owner: Index = 0


class Metric(msgspec.Struct, frozen=True, array_like=True):
    """A number summed over samples, like the loss: `value` is a scalar tensor."""

    name: Name
    value: Index


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One way to run the model.

    `types` has a row of `Graph.types` for every value id. `train` has a `loss`, a scalar that is a *sum*, and
    so has `evaluate`, its twin if the model differs in evaluation. `count` is the loss's divisor at the end
    of a step: a scalar value, or None for the batch size. `updates` are pairs of a state row and its next
    value. `boundaries[i]` is the node before which layer i + 1 begins.
    """

    name: Name
    inputs: Annotated[tuple[Port, ...], msgspec.Meta(min_length=1, max_length=PORTS_MAX)]
    labels: Annotated[tuple[Port, ...], msgspec.Meta(max_length=PORTS_MAX)]
    nodes: Annotated[tuple[GraphNode, ...], msgspec.Meta(min_length=1, max_length=NODES_MAX)]
    types: Annotated[tuple[Index, ...], msgspec.Meta(max_length=4 * NODES_MAX)]
    outputs: Annotated[tuple[Index, ...], msgspec.Meta(max_length=PORTS_MAX)]
    loss: Index | None
    count: Index | None
    metrics: Annotated[tuple[Metric, ...], msgspec.Meta(max_length=PORTS_MAX)]
    updates: Annotated[tuple[tuple[Index, Index], ...], msgspec.Meta(max_length=TABLE_MAX)]
    boundaries: Annotated[tuple[Index, ...], msgspec.Meta(max_length=LAYERS_MAX)]


class Graph(msgspec.Struct, frozen=True, array_like=True):
    """A whole model. `layers` are names, one more than an entry point has boundaries.

    `counters` are state-dict names of batch norm's `num_batches_tracked`, which only count micro-batches.
    """

    version: Annotated[int, msgspec.Meta(ge=GRAPH_VERSION, le=TYPED_GRAPH_VERSION)]
    name: Name
    symbols: Annotated[tuple[Symbol, ...], msgspec.Meta(max_length=SYMBOLS_MAX)]
    expressions: Annotated[tuple[Expression, ...], msgspec.Meta(max_length=TABLE_MAX)]
    types: Annotated[tuple[TensorType, ...], msgspec.Meta(max_length=TABLE_MAX)]
    operators: Annotated[tuple[OperatorName, ...], msgspec.Meta(max_length=1_024)]
    owners: Annotated[tuple[Name, ...], msgspec.Meta(max_length=TABLE_MAX)]
    parameters: Annotated[tuple[Parameter, ...], msgspec.Meta(max_length=PARAMETERS_MAX)]
    constants: Annotated[tuple[Constant, ...], msgspec.Meta(max_length=TABLE_MAX)]
    states: Annotated[tuple[GraphState, ...], msgspec.Meta(max_length=TABLE_MAX)]
    entries: Annotated[tuple[Entry, ...], msgspec.Meta(min_length=1, max_length=ENTRIES_MAX)]
    layers: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1, max_length=LAYERS_MAX + 1)]
    counters: Annotated[tuple[Name, ...], msgspec.Meta(max_length=PARAMETERS_MAX)] = ()

    def entry(self, name: str) -> Entry:
        """Return the entry point with this name. Raises KeyError."""
        for entry in self.entries:
            if entry.name == name:
                return entry
        raise KeyError(name)


class StageEntry(msgspec.Struct, frozen=True, array_like=True):
    """A stage's part of one entry point. Value ids are those of the whole entry.

    `inputs` come from the previous stage (the model's own inputs at the first stage), `outputs` go to the
    next one (the model's own at the last). A value in both is passed through. `backward_inputs` are the
    inputs whose gradients are sent back, `backward_outputs` the outputs whose gradients arrive. `types` maps
    ids of inputs, labels and all values that its nodes make to rows of `StageGraph.types`; admission compares
    them with torch. `statistics` has, for each batch norm in training, its node id, its position among the
    uses of its statistics in one micro-batch, and the number of uses. `moved` has, for each batch statistic
    held here that only norms of other stages update, its row, their momentum, and their number.
    """

    name: Name
    inputs: tuple[Index, ...]
    labels: tuple[Index, ...]
    nodes: tuple[GraphNode, ...]
    outputs: tuple[Index, ...]
    backward_inputs: tuple[Index, ...]
    backward_outputs: tuple[Index, ...]
    types: tuple[tuple[Index, Index], ...]
    loss: Index | None
    count: Index | None
    metrics: tuple[Metric, ...]
    updates: tuple[tuple[Index, Index], ...]
    statistics: tuple[tuple[Index, Index, Index], ...]
    moved: tuple[tuple[Index, float, Index], ...] = ()


class StageGraph(msgspec.Struct, frozen=True, array_like=True):
    """The graph of one stage: `partition.model.cut` makes it from a checked graph, on the machine that runs
    it.

    Tables are the graph's own, so rows mean the same; `rows`, `constant_rows` and `state_rows` are those that
    this stage holds, ascending. `tied` are the parameter rows that other stages hold too: their gradients are
    summed over stages. `borrowed` are the tied rows that an earlier stage also holds, which reports on them.
    """

    graph: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    index: Index
    stages: Index
    symbols: tuple[Symbol, ...]
    expressions: tuple[Expression, ...]
    types: tuple[TensorType, ...]
    operators: tuple[OperatorName, ...]
    owners: tuple[Name, ...]
    rows: tuple[Index, ...]
    parameters: tuple[Parameter, ...]
    tied: tuple[Index, ...]
    borrowed: tuple[Index, ...]
    constant_rows: tuple[Index, ...]
    constants: tuple[Constant, ...]
    state_rows: tuple[Index, ...]
    states: tuple[GraphState, ...]
    entries: tuple[StageEntry, ...]

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.stages - 1

    def entry(self, name: str) -> StageEntry:
        """Return the entry point with this name. Raises KeyError."""
        for entry in self.entries:
            if entry.name == name:
                return entry
        raise KeyError(name)


def version_for(parameters: Sequence[Parameter]) -> int:
    """Return the lowest version that can express a graph with these parameters."""
    dtypes = {row.type.dtype for row in parameters}
    return GRAPH_VERSION if len(dtypes) <= 1 and dtypes <= set(TRAINED) else TYPED_GRAPH_VERSION


def encode_graph(graph: Graph) -> bytes:
    """Return the only encoding of a graph."""
    return encode(graph)


class _ConstantOutline(msgspec.Struct, frozen=True, array_like=True):
    names: msgspec.Raw
    type: msgspec.Raw
    data: msgspec.Raw


_VERSION_BYTES_MAX = 9
"""Length of the longest integer in MessagePack."""


class _Outline(msgspec.Struct, frozen=True, array_like=True):
    """A graph whose parts stay encoded, so that only their lengths are known."""

    version: msgspec.Raw
    name: msgspec.Raw
    symbols: msgspec.Raw
    expressions: msgspec.Raw
    types: msgspec.Raw
    operators: msgspec.Raw
    owners: msgspec.Raw
    parameters: msgspec.Raw
    constants: Annotated[tuple[_ConstantOutline, ...], msgspec.Meta(max_length=TABLE_MAX)]
    states: msgspec.Raw
    entries: msgspec.Raw
    layers: msgspec.Raw
    counters: msgspec.Raw


def decode_graph(data: bytes) -> Graph:
    """Return a graph of the right form; `partition.model.check.check_graph` validates it.

    Raises:
        RemoteProtocolError: too long, of the wrong form, or not in its canonical encoding.
    """
    outline: _Outline = decode(data, _Outline, bytes_max=GRAPH_BYTES_MAX)
    version: int = decode(bytes(outline.version), int, bytes_max=_VERSION_BYTES_MAX)
    if not GRAPH_VERSION <= version <= TYPED_GRAPH_VERSION:
        known = f"{GRAPH_VERSION} to {TYPED_GRAPH_VERSION}"
        raise RemoteProtocolError(f"a graph in version {version} of the format; readable are {known}")
    structure = len(data) - sum(len(constant.data) for constant in outline.constants)
    del outline
    if structure > STRUCTURE_BYTES_MAX:
        raise RemoteProtocolError(f"a graph with {structure} bytes in addition to its constants' data")
    graph: Graph = decode(data, Graph, bytes_max=GRAPH_BYTES_MAX)
    if encode(graph) != data:
        raise RemoteProtocolError("a graph that is not in its canonical byte form")
    return graph


def graph_hash(data: bytes) -> bytes:
    """Return the name of a graph: BLAKE3 of its bytes."""
    return blake3(data).digest()


def arguments_of(node: GraphNode) -> Iterator[Item]:
    """Yield every argument of a node, the elements of lists one by one."""
    for argument in (*node.arguments, *(value for _, value in node.keywords)):
        if isinstance(argument, Items):
            yield from argument.items
        else:
            yield argument


def values_of(node: GraphNode) -> Iterator[int]:
    """Yield the ids of the values that a node takes, as often as it takes them."""
    for argument in arguments_of(node):
        if isinstance(argument, Value):
            yield argument.id
