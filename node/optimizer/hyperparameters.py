"""The hyperparameters of a step of a target batch. They must be equal at all peers, or their models drift
apart.

Each peer sends short hashes of them with its step, so that others can name the differences.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from blake3 import blake3

from gossip.roster import Report

PART_BYTES = 4
"""Length of the hash of each kind of hyperparameter. Two are equal by chance once in four billion."""
MOMENTUM = frozenset({"momentum", "betas", "dampening", "nesterov", "alpha", "rho", "beta2_decay"})
OWN = frozenset({"params", "foreach", "fused", "capturable", "differentiable", "initial_lr", "param_names"})
"""Keys that may differ between peers, because they change how a step is computed but not its result."""
KINDS = ("learning rate", "momentum", "weight_decay, eps or other number")


def settings_of(optimizers: Sequence[torch.optim.Optimizer]) -> bytes:
    """Return the concatenated hashes of each kind of hyperparameter in the groups."""
    parts: list[list[Any]] = [[], [], []]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for key in sorted(group.keys() - OWN):
                place = 0 if key == "lr" else 1 if key in MOMENTUM else 2
                parts[place].append((key, _plain(group[key])))
    return b"".join(blake3(repr(part).encode()).digest()[:PART_BYTES] for part in parts)


def differences(own: bytes, step: int, reports: Iterable[Report], groups: Sequence[Mapping[str, Any]]) -> str:
    """Name the differences of other peers in this step, found by their hashes; empty if there are none."""
    counts = [0] * len(KINDS)
    for report in reports:
        if own and report.step.equals(step) and len(report.settings) == len(own):
            for place in range(len(KINDS)):
                part = slice(PART_BYTES * place, PART_BYTES * (place + 1))
                counts[place] += report.settings[part] != own[part]
    rates = ", ".join(f"{float(group['lr']):g}" for group in groups[:4])
    texts = [
        f"{count} made step {step} by another {kind}" + (f" (here {rates})" if place == 0 else "")
        for place, (count, kind) in enumerate(zip(counts, KINDS, strict=True))
        if count
    ]
    return ", ".join(texts) + ": models drift apart until all have the same" if texts else ""


def _plain(value: Any) -> Any:
    """Return a value whose text is the same on every device: for a tensor, its numbers."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, list | tuple):
        return tuple(_plain(each) for each in value)
    return value
