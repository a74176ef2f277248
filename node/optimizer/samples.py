"""How many samples a step saw: the first dimension of what enters the model, unless the script says.

A script with three changed lines tells nobody its batch size. The outermost module that holds one of the
optimizer's parameters is found at its first call; from then on only that one is watched.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle


class SampleCounter:
    """Counts samples that enter the model in training, between two calls of `take`."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        self._parameters = {id(parameter) for parameter in parameters}
        self._counted = 0
        self.has_seen = False
        self._handle: RemovableHandle | None = register_module_forward_pre_hook(self._find)

    def take(self) -> int:
        """Samples since the last call; 0 where none were seen."""
        counted, self._counted = self._counted, 0
        return counted

    def close(self) -> None:
        """Watch no longer."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _find(self, module: torch.nn.Module, arguments: Any) -> None:  # noqa: ARG002 - torch's signature
        if not any(id(parameter) in self._parameters for parameter in module.parameters()):
            return
        self.close()
        # After the call: this first one is counted too.
        self._handle = module.register_forward_hook(self._count, with_kwargs=True)

    def _count(self, module: torch.nn.Module, arguments: Any, keywords: Any, output: Any) -> None:  # noqa: ARG002 - torch's signature
        if not (module.training and torch.is_grad_enabled()):
            return
        for value in (*arguments, *keywords.values()):
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                self._counted += value.shape[0]
                self.has_seen = True
                return
