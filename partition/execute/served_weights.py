"""The weights of a stage that serves: packed for its products if there is room, and readable again.

A weight that only linear layers read need not stay in the arena once oneDNN has packed it
(`partition.execute.products`). Its pages are returned to the system, and a replica that needs its values gets
them from the packed form, bit for bit. So packing takes no additional memory permanently, except for weights
that other operators read too, such as an embedding tied to the last layer.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from crypto.errors import RemoteProtocolError
from partition.execute.products import Products
from partition.execute.vector import ParameterVector
from partition.model.graph import ParameterValue, StageGraph, arguments_of
from partition.stage import ReadValues
from partition.stage_layout import Slot


class ServedWeights:
    """The weights of a served stage. `released` are the rows whose values are no longer in the arena."""

    def __init__(
        self, graph: StageGraph, slots: Sequence[Slot], values: ParameterVector, products: Products
    ) -> None:
        self.products = products
        self.released: tuple[int, ...] = ()
        self._slots = {slot.row: slot for slot in slots}
        self._values = values
        self._uses = Counter(
            argument.row
            for entry in graph.entries
            for node in entry.nodes
            for argument in arguments_of(node)
            if isinstance(argument, ParameterValue)
        )

    def take(self, parameters: Mapping[int, torch.Tensor]) -> None:
        """Pack values that were all written anew, try the products, and release duplicates."""
        self.products.try_all(parameters)
        alone = [row for row, count in self.products.packed.items() if count == self._uses[row]]
        self.released = tuple(row for row in sorted(alone) if self._values.release(self._slots[row]))

    def read(self, request: ReadValues) -> bytes:
        """Return a range of values as they are stored. Raises RemoteProtocolError if the stage has no such
        value."""
        slot, end = self._slots.get(request.row), request.begin + request.length
        if slot is None or end > slot.parameter.stored_bytes:
            raise RemoteProtocolError(
                f"row {request.row} does not have {request.length} bytes from {request.begin} on"
            )
        packed = request.row in self.released
        values = self.products.values(request.row) if packed else self._values.view(slot)
        return values.detach().cpu().reshape(-1).view(torch.uint8)[request.begin : end].numpy().tobytes()
