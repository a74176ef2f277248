"""The state of a stage that is trained, in arenas shared with its node: parameters, sums, totals and moments.

Torch's parameters are views into the arena `parameters` and their `.grad` views into `gradients`. So sums
grow in place over the micro-batches, and averaging reads and writes without a copy. On a device that does not
share the host's memory, each arena has a twin on the device, which is copied when the two must agree.

Not here: which micro-batches the sums hold (`partition.execute.open_step`).
"""

from collections.abc import Mapping

import torch
from blake3 import blake3

from crypto.errors import LocalProtocolError, RemoteProtocolError
from partition.execute.interpret import DTYPES
from partition.execute.optimize import Optimizer, clip_factor
from partition.execute.step_arithmetic import check_moments, squared_norm
from partition.execute.tensor_io import NotFinite, is_finite, tensor_of
from partition.execute.values import first_values
from partition.execute.vector import ParameterVector, Vector
from partition.execute.weights import export_file, import_file
from partition.model.graph import Recipe
from partition.stage import ARENAS, Apply, StageSpecification
from partition.stage_layout import arena_bytes, message_bytes_max, parameter_layout


class StageArenas:
    """The tensors over the arenas of one stage. `parameters` are keyed by row; `statistics` are the sums for
    the parameters that are running statistics.

    Raises:
        LocalProtocolError: an arena is missing or has the wrong size.
    """

    def __init__(
        self, specification: StageSpecification, arenas: Mapping[str, memoryview], device: torch.device
    ) -> None:
        for name, size in arena_bytes(specification).items():
            if name not in arenas or arenas[name].nbytes != size:
                raise LocalProtocolError(f"the arena '{name}' must have {size} bytes")
        self._specification = specification
        self._graph = graph = specification.graph
        dtype = DTYPES[specification.dtype]
        self._memory = arenas["parameters"]
        self.slots = parameter_layout(specification)
        self.values = ParameterVector(self._memory, self.slots, device)
        self.vectors = {name: Vector(arenas[name], dtype, device) for name in ARENAS[1:]}
        self._gradients, self._totals = self.vectors["gradients"], self.vectors["totals"]
        self._moments = self.vectors["moments"]
        self.parameters: dict[int, torch.Tensor] = {}
        self.statistics: dict[int, torch.Tensor] = {}
        self._begin()
        self.constants = {
            row: tensor_of(constant, device)
            for row, constant in zip(graph.constant_rows, graph.constants, strict=True)
        }
        size = sum(slot.size for slot in self.slots if slot.parameter.kind != "frozen")
        self._optimizer = Optimizer(
            specification.optimizer,
            self.slots,
            self.parameters,
            lambda number, slot: self._moments.view(slot, start=number * size),
        )

    def _begin(self) -> None:
        """Write the initial values that have a recipe."""
        for slot in self.slots:
            view = self.values.view(slot)
            if isinstance(slot.parameter.source, Recipe):
                first_values(slot.parameter, self._specification.seed, view.dtype, view)
            if slot.parameter.kind == "parameter":
                view.requires_grad_()
                view.grad = self._gradients.view(slot)
            elif slot.parameter.kind == "statistic":
                self.statistics[slot.row] = self._gradients.view(slot)
            self.parameters[slot.row] = view
        self.values.give()

    # Sums and totals

    def give_sums(self) -> None:
        """Copy the sums to the node's memory."""
        self._gradients.give()

    def clear_sums(self) -> None:
        """Set all sums to zero."""
        self._gradients.tensor.zero_()
        self._gradients.give()

    def clear_totals(self) -> None:
        """Set all totals to zero."""
        self._totals.tensor.zero_()
        self._totals.give()

    def squared_norm(self) -> float:
        """Return the squared norm of the totals, without parameters on which another stage reports."""
        return squared_norm(self._totals, self.slots, self._graph.borrowed)

    # The step

    def step(self, request: Apply, kept: Mapping[int, float]) -> None:
        """Step the optimizer by the totals. Of the running statistics in a row, the share `kept` stays.
        Raises NotFinite."""
        clip = clip_factor(self._specification.optimizer, request.squared_norm, request.samples)
        self._totals.take()
        if not is_finite(self._totals.tensor):
            raise NotFinite("a total gradient is not finite")
        # First the mean, then the factor: torch.nn.utils.clip_grad_norm_ rounds in this order.
        torch.div(self._totals.tensor, request.samples, out=self._gradients.tensor)
        if clip < 1:
            self._gradients.tensor.mul_(clip)
        self._optimizer.step(request.step, request.rate)
        for slot in self.slots:
            if slot.row in self.statistics:
                self.parameters[slot.row].mul_(kept.get(slot.row, 1.0)).add_(self._totals.view(slot))
        self.values.give()
        self._moments.give()

    def digest(self) -> bytes:
        """Return the BLAKE3 of the parameters."""
        return blake3(self._memory).digest()

    # Values from outside

    def export(self) -> bytes:
        """Return the parameters as a safetensors file."""
        return export_file(self._memory, self.slots, self._graph.constants)

    def import_values(self, data: bytes) -> None:
        """Read parameters from a safetensors file. Raises RemoteProtocolError if it is not for this stage."""
        if len(data) > message_bytes_max(self._specification):
            raise RemoteProtocolError(f"a safetensors file of {len(data)} bytes is not this stage's")
        arrays = import_file(data, self.slots, self._graph.constants)
        with torch.no_grad():
            for row, array in arrays.items():
                held = self.parameters[row]
                held.copy_(torch.tensor(array).view(held.dtype).view(held.shape))
        self.values.give()

    def take(self, *, has_moments: bool) -> None:
        """Read the values that the node has written. Raises RemoteProtocolError if they cannot belong to a
        stage."""
        if not all(map(is_finite, self.values.runs())):
            raise RemoteProtocolError("a parameter is not finite")
        if has_moments:
            check_moments(self._moments.shared, self._specification.optimizer)
        self.values.take()
        self._moments.take()
