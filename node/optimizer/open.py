"""Makes an optimizer that trains with peers from an optimizer of torch and a running node."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gossip.averaging.aggregates import chosen, obstacle_of
from gossip.averaging.catalogue import NAMES
from gossip.averaging.group import Aggregate
from node.errors import UsageError
from node.optimizer.differences import classes_of, kind_of
from node.optimizer.place import RunPlace
from node.optimizer.plugins import strategy_maker
from node.optimizer.settings import Settings
from node.optimizer.wrapper import PeerOptimizer
from node.portal import Portal
from node.text import admit_text

log = logging.getLogger("peerloom")
Optimizer = torch.optim.Optimizer
Module = torch.nn.Module
"""The names with which `node.library`, which does not import torch, types its method."""


def open_optimizer(
    portal: Portal[Any],
    optimizer: Optimizer | Sequence[Optimizer],
    model: Module | None,
    join_seconds: float,
    **options: Any,
) -> PeerOptimizer:
    """Make the optimizer; see `node.library.sync.SyncNode.optimizer`."""
    settings = Settings(**options)
    several = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
    wrapped = PeerOptimizer(several, model, settings)
    me = portal.subject
    averaging = me.averaging
    is_private = averaging.is_private or settings.admit != "open"
    door = portal.run(averaging.invitations.door, settings.run_id, settings.admit, settings.invitation)
    rule = choose_rule(settings, is_private=is_private)
    place = RunPlace(
        portal, settings.run_id, kind_of(settings, classes_of(several)), rule, door, join_seconds
    )
    session = place.take(wrapped.rows, wrapped.give_up)
    if not is_private:
        who = admit_text(settings.admit, is_private=False)
        keeps_out = 'admit="invited", or a swarm with a key, keeps others out'
        log.warning("run %r: %s; averaged by %s; %s", settings.run_id, who, rule, keeps_out)
    wrapped.join(session, place, rule)
    return wrapped


def choose_rule(settings: Settings, *, is_private: bool) -> Aggregate:
    """Return the rule of a run with these settings. Raises UsageError if it contradicts another setting."""
    obstacle = obstacle_of(settings.strategy, settings.codec)
    if settings.group_size_max == 2:
        obstacle = obstacle or "in groups of two nobody can say which of them lies"
    if settings.average_moments:
        obstacle = (
            obstacle or "average_moments=True: numbers cut one by one leave moments that never were one"
        )
    if settings.aggregate != "mean" and settings.strategy not in NAMES:  # a user's own strategy
        own = strategy_maker(settings.strategy, settings.local_steps or 1, settings.codec)
        if own(np.zeros(1, np.float32)).mode == "exchange":
            obstacle = f"strategy {settings.strategy} exchanges vectors whole, and no rule compares those"
    try:
        return chosen(settings.aggregate, is_private=is_private, obstacle=obstacle)
    except ValueError as error:
        raise UsageError(f"optimizer: {error}") from None


__all__ = ["Module", "Optimizer", "PeerOptimizer", "open_optimizer"]
