"""One or several optimizers of torch as one: groups, memory and state dictionaries in torch's form.

Not here: a step of the run (`node.optimizer.wrapper`).
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch


class JoinedOptimizer(torch.optim.Optimizer):
    """Implements the interface of a torch optimizer over wrapped ones. Subclasses define `step`."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Raises TypeError for optimizers that cannot train with peers."""
        if not optimizers or not all(isinstance(each, torch.optim.Optimizer) for each in optimizers):
            raise TypeError("want an optimizer of torch, or several")
        if any(isinstance(each, torch.optim.LBFGS) for each in optimizers):
            raise TypeError("LBFGS computes the loss again within a step; it cannot train with peers")
        if any(isinstance(each, torch.optim.SparseAdam) for each in optimizers):
            raise TypeError("SparseAdam accepts only sparse gradients, which cannot be averaged; use Adam")
        self._inner = tuple(optimizers)
        # Do not call the base class's `__init__`: it would make groups of its own, but those of the wrapped
        # optimizers are used.
        super().__setstate__({})
        self._warned_capturable_if_run_uncaptured = True

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]  # as the wrapped one has them
        if len(self._inner) == 1:
            return self._inner[0].param_groups
        return [group for inner in self._inner for group in inner.param_groups]

    @property
    def state(self) -> "defaultdict[torch.Tensor, Any]":  # type: ignore[override]  # as above
        if len(self._inner) == 1:
            return self._inner[0].state
        return defaultdict(dict, {key: value for inner in self._inner for key, value in inner.state.items()})

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]  # as above
        return self._inner[0].defaults

    def _step_wrapped(self) -> float:
        """Step each wrapped optimizer; return how many seconds that took."""
        begun = time.perf_counter()
        for inner in self._inner:
            inner.step()
        return time.perf_counter() - begun

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero gradients like the wrapped optimizer."""
        for inner in self._inner:
            inner.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer. Raises ValueError if there are several, because it is unclear
        which one gets the group."""
        if len(self._inner) > 1:
            raise ValueError("several optimizers are wrapped: add the group to the one that is to train it")
        self._inner[0].add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state. The states of several are joined, with consecutive numbers of
        parameters. Either form can be loaded into the plain optimizer."""
        joined: dict[str, Any] = {"state": {}, "param_groups": []}
        first = 0
        for inner in self._inner:
            own = inner.state_dict()
            count = sum(len(group["params"]) for group in own["param_groups"])
            joined["state"].update({first + number: value for number, value in own["state"].items()})
            for group in own["param_groups"]:
                numbers = [first + number for number in group["params"]]
                joined["param_groups"].append({**group, "params": numbers})
            first += count
        return joined

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of the plain optimizer."""
        first = at = 0
        for inner in self._inner:
            groups = state_dict["param_groups"][at : at + len(inner.param_groups)]
            at += len(groups)
            count = sum(len(group["params"]) for group in groups)
            numbered = range(first, first + count)
            own = {n - first: value for n, value in state_dict["state"].items() if n in numbered}
            shifted = [{**group, "params": [n - first for n in group["params"]]} for group in groups]
            inner.load_state_dict({"state": own, "param_groups": shifted})
            first += count
