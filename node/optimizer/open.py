"""From an optimizer of torch and a running node to an optimizer that trains with peers."""

from collections.abc import Sequence
from typing import Any

import torch

from node.averaging.participation import Participation
from node.averaging.signature import signature_of
from node.library.portal import Portal
from node.optimizer.session import Session
from node.optimizer.settings import Settings
from node.optimizer.wrapper import PeerOptimizer

Optimizer = torch.optim.Optimizer
Module = torch.nn.Module
"""Under these names `node.library` types its method, which itself does not import torch."""


def open_optimizer(
    portal: Portal[Any],
    optimizer: Optimizer | Sequence[Optimizer],
    model: Module | None,
    join_seconds: float,
    **options: Any,
) -> PeerOptimizer:
    """See `node.library.sync.SyncNode.optimizer`."""
    settings = Settings(**options)
    several = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    wrapped = PeerOptimizer(several, model, settings)
    signature = signature_of(kind_of(settings, several), wrapped.rows)
    me = portal.subject
    run: Participation = portal.call_sync(me.averaging.open, settings.run_id, signature)
    if portal.call_sync(lambda: len(me.members())):
        portal.run(run.settle, join_seconds)
    wrapped.join(Session(portal, run))
    return wrapped


def kind_of(settings: Settings, optimizers: Sequence[Optimizer]) -> str:
    """Return what has to agree beside the tensors: how they are trained, and by which optimizers."""
    names = ",".join(type(each).__name__ for each in optimizers)
    if settings.local_steps is not None:
        moments = " moments" if settings.average_moments else ""
        own = "" if settings.strategy == "average" else f" {settings.strategy}"
        return f"local {names} {settings.codec}{own}{moments}"
    return f"batch {settings.target_batch_size} {names} {settings.codec} {settings.clip_grad_norm}"


__all__ = ["Module", "Optimizer", "PeerOptimizer", "open_optimizer"]
