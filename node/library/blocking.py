"""The public surface in blocking form. Generated from `node/library/surface.py`: do not edit.

Write it anew with `python -m node.library.generate`.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from node import state as views
from node.averaging.once import Averaged
from node.events import Event, JoinTried
from node.library.portal import Portal
from node.library.surface import Surface


class BlockingSurface:
    """What `Surface` offers, for any other thread. Each call may raise PortalClosed."""

    def __init__(self, portal: Portal[Any], of: Surface) -> None:
        self._portal = portal
        self._of = of

    @property
    def id(self) -> str:
        """This node's peer id, as text: `12D3KooW...`."""
        return self._portal.call_sync(lambda: self._of.id)

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where other nodes reach this one, as `host:port`: what `join=[...]` takes."""
        return self._portal.call_sync(lambda: self._of.addresses)

    def members(self) -> tuple[views.MemberView, ...]:
        """Return the other members believed alive, by peer id."""
        return self._portal.call_sync(self._of.members)

    def status(self) -> dict[str, Any]:
        """Return what `python -m node status --json` prints, schema `peerloom/status/1`."""
        return self._portal.call_sync(self._of.status)

    def join(self, addresses: Sequence[str]) -> tuple[JoinTried, ...]:
        """Dial these addresses now; return what became of each, in their order.

        They are tried again whenever this node is alone. Raises UsageError: an address cannot be read.
        """
        return self._portal.run(self._of.join, addresses)

    def wait_for_members(self, count: int, timeout_seconds: float = 60.0) -> None:
        """Return once `count` other members are alive. Raises JoinTimeout when they are not in time."""
        self._portal.run(self._of.wait_for_members, count, timeout_seconds)

    def events(self, since: float = math.inf, types: Sequence[type[Event]] = ()) -> Iterator[Event]:
        """Yield events of these types (none: all), in their order, until the node leaves.

        `since` (unix seconds) begins with kept ones that happened then or later, by default with new ones.
        """
        return self._portal.iterate(self._of.events, since, types)

    def average(
        self,
        tensors: Mapping[str, Any],
        group: str,
        weight: float = 1.0,
        peers: int = 1,
        timeout_seconds: float = 60.0,
        codec: str = "float32",
    ) -> Averaged:
        """Average arrays or torch tensors with those who call this for the same `group`, names and shapes.

        It waits until `peers` others take part, and `timeout_seconds` for a round. The tensors are not
        changed. Returns what was averaged and whose tensors entered; where nothing was, the same tensors and
        the reason. Raises UsageError: what is given cannot be averaged.
        """
        return self._portal.run(self._of.average, tensors, group, weight, peers, timeout_seconds, codec)
