"""The parameters that an optimizer requests for each round: its group, how long it waits for peers, and the
codecs."""

from collections.abc import Mapping

from gossip.averaging.catalogue import group_size
from gossip.averaging.codecs import Codec
from gossip.averaging.strategies import Strategy
from node.averaging.rounds import RoundWish
from node.optimizer.settings import Settings

WINDOW_STEPS = 3.0
"""A round waits for peers for the duration of this many steps here, or for `window_seconds` if that is
longer."""
SILENT_SECONDS = 3.0
"""How much longer than its window a round of a target batch waits for any peer. A peer that is not ready by
then is busy, and takes the step over later."""


def round_wish(
    settings: Settings,
    number: int | None,
    step_seconds: float,
    codecs: Mapping[str, Codec],
    strategy: Strategy | None,
) -> RoundWish:
    """Return the wish for the round of a global step, or, if there is no step number, for the next round with
    local steps. `step_seconds` is how long a step takes here; `codecs` are a user's own."""
    window = max(settings.window_seconds, WINDOW_STEPS * step_seconds)
    patience = window + SILENT_SECONDS if number is not None else max(10 * window, 120.0)
    grouping = None if strategy is None else strategy.grouping
    size_max = settings.group_size_max
    return RoundWish(
        round=number,
        codec=settings.codec if strategy is None else strategy.codec,
        mode="butterfly" if strategy is None else strategy.mode,
        codecs=codecs,
        window_seconds=window,
        patience_seconds=patience,
        size_max=size_max if grouping is None else min(size_max, group_size(grouping)),
        rate=0 if settings.only_sends else None,
    )
