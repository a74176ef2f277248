"""The tensors that a script trains now. They are checked before every step, because scripts freeze and thaw
parameters."""

from collections.abc import Sequence

import torch

from node.optimizer.layout import Layout
from node.optimizer.settings import names_of

NAMES_MAX = 4
"""Maximum number of tensors that a line names; the rest are counted."""
Mark = tuple[int, bool, tuple[int, ...], torch.dtype]


class TrainedTensors:
    """The trained parameters, and the model's buffers, as of the latest check."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], model: torch.nn.Module | None) -> None:
        """Raises TypeError for tensors that cannot be averaged, ValueError if none is trained."""
        self._optimizers = optimizers
        self._model = model
        self._marks: list[Mark] = []
        self.parameters = self.tensors = Layout([])
        """`parameters` are the trained parameters; `tensors` are these and the floating-point buffers of the
        model."""
        self._floating: list[tuple[str, torch.Tensor]] = []
        self.counts: dict[str, torch.Tensor] = {}
        """Integer buffers, which are not averaged."""
        self._read()
        if not self.parameters.items:
            raise ValueError("the optimizer trains no parameters: all are frozen")

    @property
    def all_parameters(self) -> list[torch.Tensor]:
        """Return the parameters of all groups, including frozen ones."""
        return [
            parameter
            for each in self._optimizers
            for group in each.param_groups
            for parameter in group["params"]
        ]

    @property
    def thawed(self) -> Layout:
        """Return the tensors that would be averaged if nothing in the groups were frozen."""
        return Layout([*names_of(self._optimizers, self._model, is_thawed=True), *self._floating])

    @property
    def numbered(self) -> Layout:
        """Return the tensors that would be averaged without `model`, with numbers as names."""
        return Layout(names_of(self._optimizers, None))

    def gradients(self) -> list[torch.Tensor | None]:
        """Return the gradient of each trained parameter. Raises TypeError for a sparse one."""
        found = [slot.tensor.grad for slot in self.parameters.slots]
        for slot, gradient in zip(self.parameters.slots, found, strict=True):
            if gradient is not None and gradient.layout is not torch.strided:
                raise TypeError(f"{slot.name}: a sparse gradient cannot be averaged; use sparse=False")
        return found

    def look(self) -> str:
        """Check the tensors again. Return the changes, with names; empty if nothing has changed, or
        everything is frozen now."""
        if self._marked() == self._marks:
            return ""
        old = self.parameters, self.tensors
        self._read()
        if not self.parameters.items:
            self.parameters, self.tensors = old
            return ""
        before = {name: (shape, kind) for name, shape, kind in old[0].rows}
        now = {name: (shape, kind) for name, shape, kind in self.parameters.rows}
        reshaped = [name for name in now if before.get(name, now[name]) != now[name]]
        parts = [
            ("trains {} now", [name for name in now if name not in before]),
            ("trains {} no more", [name for name in before if name not in now]),
            ("trains {} in another shape or type", reshaped),
        ]
        said = [text.format(listed(names)) for text, names in parts if names]
        return ", ".join(said) or "trains other tensors in the place of those before"

    def strays(self) -> str:
        """Name trained parameters that the model no longer has, for example after a layer was replaced."""
        if self._model is None:
            return ""
        known = {id(parameter) for parameter in self._model.parameters()}
        names = [slot.name for slot in self.parameters.slots if id(slot.tensor) not in known]
        # if all are missing, it is a different model, or a wrapper's
        if not names or len(names) == len(self.parameters.slots):
            return ""
        return f"{listed(names)} are in the optimizer but no longer in the model: make the optimizer again"

    def _marked(self) -> list[Mark]:
        return [(id(each), each.requires_grad, tuple(each.shape), each.dtype) for each in self.all_parameters]

    def _read(self) -> None:
        names = names_of(self._optimizers, self._model)
        buffers = [] if self._model is None else list(self._model.named_buffers())
        self._floating = [(name, buffer) for name, buffer in buffers if buffer.is_floating_point()]
        self.counts = {name: buffer for name, buffer in buffers if not buffer.is_floating_point()}
        self.parameters = Layout(names)
        self.tensors = Layout([*names, *self._floating])
        self._marks = self._marked()


def listed(names: Sequence[str]) -> str:
    """Return the first few names for a line, and the number of the rest."""
    more = len(names) - NAMES_MAX
    return ", ".join(names[:NAMES_MAX]) + (f" and {more} more" if more > 0 else "")
