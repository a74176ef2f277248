"""Seeded hostile graphs: operators called with arbitrary arguments, and valid graphs with an error.

`operator_case` makes a stage that calls a few operators on small tensors. Most arguments fit; some are
dangerous for a kernel. `mutated_case` changes a part of a valid graph, as bytes or as data. Neither function
says what should happen: the check may refuse a case or run it.
"""

import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from partition.execute.schema import Rule, signature
from partition.model.graph import (
    DataType,
    Expression,
    FormatName,
    Graph,
    GraphNode,
    Items,
    Parameter,
    ParameterValue,
    Size,
    StageEntry,
    StageGraph,
    Symbol,
    TensorType,
    TypeName,
    Value,
    encode_graph,
)
from partition.model.operators import BATCH_NORM, OPERATORS
from tests.partition.graphs import ONES, UNIFORM
from tests.partition.hostile_forms import Form, forms
from tests.partition.hostile_stage import Case, Outcome
from tests.source import ROOT

SHAPES = ((2, 3), (3, 3), (2, 3, 4), (2, 4, 6, 6), (1, 2, 4, 4, 4), (6,), (1,), ())
DTYPES: tuple[DataType, ...] = ("float32", "float32", "float32", "int64", "int64", "bool", "int32", "uint8")
WILD = (
    *(0, -1, 1, 2, 3, 7, -2, 64, 1000, 65_535, 65_536),
    *(2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63), -(2**31)),
)
WILD_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-30, 1e30, 1e300, -1e300, float("inf"), float("-inf"), 2.5, 1e-4)
TEXTS = (
    *("none", "tanh", "ij", "xy", "constant", "reflect", "replicate", "circular", "same", "valid"),
    *("floor", "trunc", "left", "ij,jk->ik", "ii->i", "i", "", "a...,...b->ab", "xyz"),
)
NAMES = tuple(OPERATORS)
BATCH = Size(0)


class Died(AssertionError):
    """The process ended by a signal, or by an exception that is not a refusal. Holds its output and the
    case."""


class HostileProcess:
    """A process that runs cases one after another. After `Died` the caller may start it again."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.partition.hostile_stage"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=ROOT,
        )

    def ask(self, case: Case) -> Outcome:
        """Run a case. Raises Died if no answer came."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        data = msgspec.msgpack.encode(case)
        process.stdin.write(len(data).to_bytes(4, "big") + data)
        process.stdin.flush()
        line = process.stdout.readline()
        if not line:
            assert process.stderr is not None
            text = process.stderr.read().decode()
            raise Died(f"exit {process.wait()}\n{text[-3000:]}")
        return msgspec.json.decode(line, type=Outcome)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


# Operators


def operator_case(seed: int, name: str | None = None) -> Case:
    """Return a stage of one to three operators; the sum of their results is the loss."""
    rng = random.Random(seed)
    maker = _Maker(rng)
    for _ in range(rng.choice((1, 1, 2, 3))):
        maker.call(name or rng.choice(NAMES))
        name = None
    return Case(b"", maker.stage(), rng.randrange(2**32), autocast=rng.random() < 0.1)


FORMS = forms()


def form_case(seed: int, number: int | None = None) -> Case:
    """Return a valid call of one operator, with up to three arbitrary arguments."""
    rng = random.Random(seed)
    maker = _Maker(rng)
    maker.form(rng.choice(FORMS) if number is None else FORMS[number])
    return Case(b"", maker.stage(), rng.randrange(2**32), autocast=rng.random() < 0.1)


class _Maker:
    """Collects the nodes of one stage."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.operators: list[str] = []
        self.nodes: list[GraphNode] = []
        self.values: list[TensorType | None] = []
        """The type if it is known."""
        for _ in range(3):
            self.values.append(TensorType(rng.choice(DTYPES), self._shape()))
        self.values.append(TensorType("int64", self._shape()))
        self.values.append(TensorType("float32", self._shape()))
        self.inputs = len(self.values)
        self.parameters = [
            Parameter((f"p{row}",), TensorType("float32", shape), "parameter", UNIFORM)
            for row, shape in enumerate(rng.sample(SHAPES[:-1], 3))
        ]
        self.parameters += [
            Parameter((name,), TensorType("float32", (3,)), "statistic", ONES)
            for name in ("mean", "variance")
        ]

    def _shape(self) -> tuple[int | Size, ...]:
        shape: tuple[int | Size, ...] = self.rng.choice(SHAPES)
        return (BATCH, *shape[1:]) if shape and self.rng.random() < 0.3 else shape

    def call(self, name: str) -> None:
        wanted = signature(name)
        # Most operators need tensors of one shape and of floating type.
        alike = self.rng.random() < 0.6
        shape = self._shape()
        dtype: DataType = "int64" if self.rng.random() < 0.3 else "float32"
        if alike:
            for number in range(self.inputs):
                if self.rng.random() < 0.7 and not self.nodes:
                    self.values[number] = TensorType(dtype, shape)
        arguments = [self._argument(name, rule) for rule in wanted.positional]
        while arguments and not wanted.positional[len(arguments) - 1].is_required and self.rng.random() < 0.6:
            arguments.pop()
        keywords = [
            (key, self._argument(name, rule))
            for key, rule in wanted.keywords.items()
            if rule.is_required or self.rng.random() < 0.15
        ]
        results = wanted.results or self.rng.choice((1, 2, 3, 4, 6))
        self._add(name, arguments, keywords, results)

    def form(self, form: Form) -> None:
        name, plain, keywords = form
        wanted = signature(name)
        self.values[3:] = []
        arguments = [self._port(argument) for argument in plain]
        self.inputs = len(self.values)
        given = [[key, argument] for key, argument in keywords]
        for _ in range(self.rng.choice((0, 1, 1, 2, 3))):
            places = [*range(len(arguments)), *range(-len(given), 0)]
            place = self.rng.choice(places)
            if place < 0:
                given[place][1] = self._argument(name, wanted.keywords[given[place][0]])
            else:
                arguments[place] = self._spoilt(arguments[place], name, wanted.positional[place])
        self._add(name, arguments, [(key, argument) for key, argument in given], wanted.results or 2)

    def _port(self, argument: object) -> Any:
        if isinstance(argument, list):
            return Items(tuple(self._port(item) for item in argument))
        if not isinstance(argument, TensorType):
            return argument
        shape = argument.shape
        if shape and self.rng.random() < 0.1:
            # A different size, or no size, or one dimension more or less.
            sides = (1, 2, 5, BATCH)
            place = self.rng.randrange(len(shape))
            shape = self.rng.choice(
                ((*shape[:place], self.rng.choice(sides), *shape[place + 1 :]), shape[1:], (1, *shape))
            )
        self.values.append(TensorType(argument.dtype, shape))
        return Value(len(self.values) - 1)

    def _spoilt(self, argument: Any, operator: str, rule: Rule) -> Any:
        if isinstance(argument, Items) and argument.items and rule.kind == "List[int]":
            items = list(argument.items)
            items[self.rng.randrange(len(items))] = self._integer(rule)
            return Items(tuple(items))
        return self._argument(operator, rule)

    def _add(self, name: str, arguments: list[Any], keywords: list[Any], results: int) -> list[Value]:
        if name not in self.operators:
            self.operators.append(name)
        first = len(self.values)
        self.values += [None] * results
        self.nodes.append(
            GraphNode(
                len(self.nodes),
                self.operators.index(name),
                tuple(arguments),
                tuple(keywords),
                tuple(range(first, first + results)),
            )
        )
        return [Value(number) for number in range(first, first + results)]

    def _argument(self, operator: str, rule: Rule) -> Any:
        rng = self.rng
        if rule.is_optional and rng.random() < 0.5:
            return None
        if rng.random() < 0.02:
            return rng.choice((None, True, "none", Items((1, 2)), 1.5, Size(0), Value(0)))
        if rule.kind.startswith("List["):
            length = rule.length or rng.choice((1, 2, 2, 3, 4))
            kind = rule.kind.removeprefix("List[").removesuffix("]")
            return Items(tuple(self._one(operator, rule, kind) for _ in range(length)))
        return self._one(operator, rule, rule.kind)

    def _one(self, operator: str, rule: Rule, kind: str) -> Any:
        rng = self.rng
        match kind:
            case "Tensor":
                return self._tensor(operator, rule)
            case "Optional[Tensor]":
                return rng.choice((None, self._tensor(operator, rule)))
            case "int":
                return self._integer(rule)
            case "float":
                return self._float(rule)
            case "number":
                return rng.choice((self._integer(rule), self._float(rule), True, 2))
            case "bool":
                return rng.random() < 0.5
            case "str":
                return rng.choice(TEXTS)
            case "ScalarType":
                return TypeName(rng.choice((*DTYPES, "float64", "bfloat16", "float16", "int8")))
            case "MemoryFormat":
                return FormatName(rng.choice(("contiguous", "preserve")))
        return None

    def _tensor(self, operator: str, rule: Rule) -> Any:
        if operator == BATCH_NORM and rule.name.startswith("running"):
            return ParameterValue(3 if rule.name == "running_mean" else 4)
        if self.rng.random() < 0.3:
            return ParameterValue(self.rng.randrange(3))
        if "ind" in rule.name and self.rng.random() < 0.7:
            return Value(3)
        return Value(self.rng.randrange(len(self.values)))

    def _integer(self, rule: Rule) -> Any:
        rng = self.rng
        if rng.random() < 0.05:
            return Size(rng.randrange(3))
        if rng.random() < 0.25:
            return rng.choice(WILD)
        low, high = rule.bounds or (-3, 8)
        return rng.randint(int(max(low, -3)), int(min(high, rng.choice((2, 4, 8)))))

    def _float(self, rule: Rule) -> float:
        if self.rng.random() < 0.3:
            return self.rng.choice(WILD_FLOATS)
        low, high = rule.bounds or (-2.0, 2.0)
        return self.rng.uniform(max(low, -2.0), min(high, 2.0))

    def stage(self) -> StageGraph:
        """Reduce every result to a number, and sum the numbers to the loss, so that forward and backward
        cover everything.
        """
        made = [Value(number) for number in range(self.inputs, len(self.values))]
        total = None
        for value in made:
            (plain,) = self._add("aten.to.dtype", [value, TypeName("float32")], [], 1)
            (number,) = self._add("aten.sum.default", [plain], [], 1)
            total = number if total is None else self._add("aten.add.Tensor", [total, number], [], 1)[0]
        assert total is not None
        known = [kind for kind in self.values[: self.inputs] if kind is not None]
        entry = StageEntry(
            "train",
            tuple(range(self.inputs)),
            (),
            tuple(self.nodes),
            (),
            tuple(n for n, kind in enumerate(known) if kind.dtype == "float32" and self.rng.random() < 0.7),
            (),
            tuple((number, number) for number in range(self.inputs)),
            total.id,
            None,
            (),
            (),
            tuple((node.id, 0, 1) for node in self.nodes if self.operators[node.operator] == BATCH_NORM),
        )
        rows = tuple(range(len(self.parameters)))
        expressions = (Expression("symbol", 0), Expression("sub", BATCH, 2), Expression("mul", BATCH, 2**30))
        return StageGraph(
            b"\0" * 32, 0, 1, (Symbol("batch", 1, 4),), expressions, tuple(known), tuple(self.operators),
            ("",), rows, tuple(self.parameters), (), (), (), (), (), (), (entry,),
        )  # fmt: skip


# Graphs


def mutated_case(seed: int, good: list[Graph]) -> Case:
    """Return a valid graph with one to four changes, or its bytes."""
    rng = random.Random(seed)
    graph = rng.choice(good)
    if rng.random() < 0.25:
        data = bytearray(encode_graph(graph))
        for _ in range(rng.randint(1, 4)):
            _mutate_bytes(rng, data)
        return Case(bytes(data), None, rng.randrange(2**32))
    tree = msgspec.msgpack.decode(encode_graph(graph))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        _mutate_tree(rng, tree)
    return Case(msgspec.msgpack.encode(tree), None, rng.randrange(2**32), autocast=rng.random() < 0.1)


def _mutate_bytes(rng: random.Random, data: bytearray) -> None:
    where = rng.randrange(len(data))
    match rng.randrange(5):
        case 0:
            data[where] = rng.randrange(256)
        case 1:
            del data[where : where + rng.randint(1, 8)]
            data += b"\xc0" * (not data)
        case 2:
            data[where:where] = rng.randbytes(rng.randint(1, 8))
        case 3:
            data[where] ^= 1 << rng.randrange(8)
        case 4:
            data[where:where] = bytes([rng.choice((0x91, 0xDD, 0xDC, 0xC6, 0xCF))]) * rng.randint(1, 2000)


def _mutate_tree(rng: random.Random, tree: list[Any]) -> None:
    """Somewhere, change one leaf, or exchange, repeat or remove one item of a list."""
    leaves = list(_leaves(tree))
    holder, place = rng.choice(leaves)
    if rng.random() < 0.8:
        holder[place] = _leaf(rng, holder[place])
        return
    holder, place = rng.choice([(holder, place), _above(tree, holder)])
    match rng.randrange(4):
        case 0:
            holder.insert(place, holder[place])
        case 1:
            holder.pop(place)
        case 2:
            holder[place] = rng.choice(holder)
        case 3:
            holder.reverse()


def _leaves(tree: list[Any]) -> Iterator[tuple[list[Any], int]]:
    for place, item in enumerate(tree):
        if isinstance(item, list) and item:
            yield from _leaves(item)
        else:
            yield tree, place


def _above(tree: list[Any], holder: list[Any]) -> tuple[list[Any], int]:
    """Return each list with the list that holds it and its index; the outermost list contains itself."""
    open_lists = [tree]
    while open_lists:
        outer = open_lists.pop()
        for place, item in enumerate(outer):
            if item is holder:
                return outer, place
            if isinstance(item, list):
                open_lists.append(item)
    return tree, 0


def _leaf(rng: random.Random, leaf: Any) -> Any:
    if rng.random() < 0.05:
        return rng.choice((None, 0, True, 1.5, "x", [], [0, 0], [7, []]))
    if isinstance(leaf, bool):
        return not leaf
    if isinstance(leaf, int):
        return rng.choice((leaf + 1, leaf - 1, leaf * 2, rng.choice(WILD), rng.randrange(8)))
    if isinstance(leaf, float):
        return rng.choice((*WILD_FLOATS, float("nan")))
    if isinstance(leaf, str) and leaf.startswith("aten."):
        return rng.choice(
            (*NAMES, "aten.as_strided.default", "aten.empty.memory_format", "prims.add.default")
        )
    if isinstance(leaf, str):
        return rng.choice((leaf + "x", "", "train", "float64", "int64", "bool", "mul", "mod", "floordiv"))
    if isinstance(leaf, bytes):
        return rng.randbytes(rng.choice((0, len(leaf), len(leaf) + 1)))
    return rng.choice((None, 0, 1, -1, [0, 0], [1, 0], [1, 2**24 - 1], [2, 0], [3, 0], [4, 0], [5, "int64"],
                       [7, [1, 2, 3]], [7, []], "x", 1.5))  # fmt: skip
