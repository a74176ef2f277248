"""Serving by a stage: ragged batches of units through the stage's part of the entry point `serve`.

The batch is padded with tokens that belong to no session, so that the rows of every product are a multiple of
four times the threads. With that, torch's kernels compute a row to the same bits whatever the other rows are
(`partition.execute.attention` has the rest). So a session that is served again from its beginning has the
same bits as before, even in different parts, alone or among others.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import msgspec
import torch

from crypto.errors import RemoteProtocolError
from partition.execute.attention import ROWS, Batch, padded, serving
from partition.execute.interpret import DTYPES, LabelOutOfRange, Program, Results
from partition.execute.pages import LayerShape, Pages, shape_of_layer
from partition.execute.tensor_io import BadPayload, Boundary, blaming
from partition.model.graph import SERVE, Size, StageEntry, TensorType
from partition.model.head import answered_kind, head_input
from partition.model.serving import attention_layers, served_sizes
from partition.model.sizes import evaluate, shape_of
from partition.stage import Serve, Served, StageSpecification, Unit

_POSITIONS, _ROWS_WANTED = 1, 2
"""Inputs of `serve` that a stage computes from the units itself."""
_VARYING = (Size(0), Size(1))
"""Sides that equal the number of tokens, and the number of wanted rows."""


class ServedStage:
    """The served sessions of one stage; one call at a time.

    Raises:
        RemoteProtocolError: the graph or the specification cannot be served.
    """

    def __init__(self, specification: StageSpecification, boundary: Boundary, device: torch.device) -> None:
        graph = specification.graph
        self._entry: StageEntry = graph.entry(SERVE)
        self._specification = specification
        self._boundary = boundary
        self._device = device
        types = dict(self._entry.types)
        self._kinds: Mapping[int, TensorType] = {
            number: graph.types[types[number]] for number in (*self._entry.inputs, *self._entry.outputs)
        }
        if specification.autocast != "off":
            raise RemoteProtocolError(
                "autocast is only for training: a served model computes in the types in which it is stored"
            )
        for kind in self._kinds.values():
            if any(isinstance(side, Size) and side not in _VARYING for side in kind.shape):
                raise RemoteProtocolError("a cut through tensors whose sizes are computed from the batch's")
        layers, dtype = layer_shapes(specification)
        self.pages = Pages(layers, dtype, specification.cache_bytes, device)
        # Inputs that every stage can derive from the units are not sent.
        self._given, self._sent = (
            tuple(number for number in numbers if number not in (_POSITIONS, _ROWS_WANTED))
            for numbers in (self._entry.inputs, self._entry.outputs)
        )
        self.given_kinds = [self._kinds[number] for number in self._given]
        self.sent_kinds = [self._kinds[number] for number in self._sent]
        head = head_input(graph) if graph.is_last else None
        self._hidden = None if head is None else answered_kind(head[1])

    def serve(
        self,
        request: Serve,
        program: Program,
        parameters: Mapping[int, torch.Tensor],
        constants: Mapping[int, torch.Tensor],
    ) -> Served:
        """Continue the sessions of a request.

        Raises:
            UnitRefused: a unit cannot be served here at this moment.
            RemoteProtocolError: no correct peer makes this request. The sessions are unchanged, except for
                tokens that a unit took back.
        """
        units = request.units
        with blaming("input"):
            sizes, _ = self._sizes(units)
            payload = msgspec.structs.replace(request.input, sizes=sizes)
            given = self._boundary.take(payload, self.given_kinds, sizes)
        kinds = self.sent_kinds
        if request.is_hidden and self._specification.graph.is_last:
            if self._hidden is None:
                raise RemoteProtocolError(
                    "the logits of this model are not computed from hidden states by a single product"
                )
            kinds = [self._hidden]
        outputs = self.compute(
            units, given, program, parameters, constants, is_hidden=kinds is not self.sent_kinds
        )
        if outputs is None:
            return Served(None)
        payload, _ = self._boundary.give(outputs, kinds, sizes, request.codec)
        return Served(payload)

    def compute(
        self,
        units: tuple[Unit, ...],
        given: Sequence[torch.Tensor],
        program: Program,
        parameters: Mapping[int, torch.Tensor],
        constants: Mapping[int, torch.Tensor],
        *,
        is_hidden: bool = False,
    ) -> list[torch.Tensor] | None:
        """Continue the sessions of `units` with the tensors `given`, of the types `given_kinds`. Return None
        if a last stage must answer no row. With `is_hidden`, return the rows as they enter the head. Raises
        like `serve`."""
        sizes, rows = self._sizes(units)
        spans = self.pages.begin(units, self._specification.sizes_max[2])
        try:
            with torch.inference_mode(), serving(Batch(self.pages, spans)):
                results = self._run(units, given, program, parameters, constants, sizes)
                outputs = self._hidden_rows(results, rows) if is_hidden else self._outputs(results, sizes)
        except LabelOutOfRange as error:
            self.pages.abandon(units)
            raise BadPayload(str(error), "input", of_values=True) from None
        except BaseException:
            self.pages.abandon(units)
            raise
        self.pages.commit(units)
        return None if self._specification.graph.is_last and not rows else outputs

    def _sizes(self, units: Sequence[Unit]) -> tuple[tuple[int, ...], int]:
        """Return the sizes of a batch, and how many rows it wants. Raises RemoteProtocolError if there are
        too many."""
        tokens, rows = sum(unit.tokens for unit in units), sum(unit.wanted for unit in units)
        most = self._specification.sizes_max
        if tokens > most[0] or rows > most[1]:
            raise RemoteProtocolError(
                f"{tokens} tokens and {rows} rows in one call, but at most {most[0]} and {most[1]} are served"
            )
        return served_sizes(most, tokens, max(rows, 1)), rows

    def _run(
        self,
        units: tuple[Unit, ...],
        given: Sequence[torch.Tensor],
        program: Program,
        parameters: Mapping[int, torch.Tensor],
        constants: Mapping[int, torch.Tensor],
        sizes: tuple[int, ...],
    ) -> Results:
        multiple = ROWS * self._specification.threads
        wide = (padded(sizes[0], multiple), padded(sizes[1], multiple), *sizes[2:])
        inputs = dict(zip(self._given, given, strict=True))
        inputs[_POSITIONS] = _positions(units).to(self._device)
        inputs[_ROWS_WANTED] = _wanted_rows(units).to(self._device)
        table = evaluate(self._specification.graph.expressions, wide)
        ready = []
        for number in self._entry.inputs:
            kind = self._kinds.get(number)
            assert kind is not None
            ready.append(_widened(inputs[number], shape_of(kind, table)))
        return program.run(parameters, constants, {}, ready, [], wide)

    def _hidden_rows(self, results: Results, rows: int) -> list[torch.Tensor]:
        (hidden,) = results.kept
        assert self._hidden is not None
        return [hidden.reshape(-1, hidden.shape[-1])[:rows].to(DTYPES[self._hidden.dtype])]

    def _outputs(self, results: Results, sizes: tuple[int, ...]) -> list[torch.Tensor]:
        """Return the outputs without the batch's padding."""
        made = dict(zip(self._entry.outputs, results.outputs, strict=True))
        shapes = self._boundary.shapes(self.sent_kinds, sizes)
        return [
            tensor[tuple(slice(side) for side in shape)]
            for tensor, shape in zip((made[number] for number in self._sent), shapes, strict=True)
        ]


def layer_shapes(specification: StageSpecification) -> tuple[dict[int, LayerShape], torch.dtype]:
    """Return the size of a token in each attention layer of a served stage, and its type."""
    graph = specification.graph
    table = evaluate(graph.expressions, specification.sizes_max)
    found: dict[int, LayerShape] = {}
    dtypes = set()
    for layer, key, value in attention_layers(graph, graph.entry(SERVE)):
        if layer in found:
            raise RemoteProtocolError(f"layer {layer} of attention occurs twice")
        found[layer] = shape_of_layer(shape_of(key, table), shape_of(value, table))
        dtypes.add(key.dtype)
    if len(dtypes) > 1:
        raise RemoteProtocolError("layers of attention have different types")
    return found, DTYPES[dtypes.pop()] if dtypes else torch.float32


def _positions(units: tuple[Unit, ...]) -> torch.Tensor:
    return torch.cat([torch.arange(unit.position, unit.position + unit.tokens) for unit in units])


def _wanted_rows(units: tuple[Unit, ...]) -> torch.Tensor:
    ends = accumulate(unit.tokens for unit in units)
    return torch.cat([torch.arange(end - unit.wanted, end) for unit, end in zip(units, ends, strict=True)])


def _widened(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor, padded with zeros to `shape`."""
    if tuple(tensor.shape) == shape:
        return tensor
    wide = tensor.new_zeros(shape)
    wide[tuple(slice(side) for side in tensor.shape)] = tensor
    return wide
