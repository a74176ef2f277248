"""The traffic that a node sends, by protocol: the world's counters, divided by the summed uptime of all
nodes.

A world counts `messages PROTOCOL` and `bytes PROTOCOL`. Its other counters (lost, missed, refused) are
reported by name, with their final values.
"""

from collections.abc import Mapping

from sim.measures.rows import Row, known
from sim.measures.swarm import Swarm
from sim.observers import World

KINDS = ("bytes", "messages")


class Traffic:
    """Metrics of each window: `sent_bytes_per_node_second`, `sent_messages_per_node_second`, by protocol."""

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._before: dict[tuple[str, str], int] = {}
        self._node_seconds_before = 0.0

    def sample(self, now: float, world: World, rows: list[Row]) -> None:
        """Close the window that began with the previous sample."""
        node_seconds = self._swarm.node_seconds(now)
        took, self._node_seconds_before = node_seconds - self._node_seconds_before, node_seconds
        counted = by_protocol(world.counters())
        for (kind, protocol), count in sorted(counted.items()):
            sent = count - self._before.get((kind, protocol), 0)
            if took > 0:
                rows.append(Row(now, f"sent_{kind}_per_node_second", protocol, sent / took))
        self._before = counted

    def summary(self, now: float, world: World) -> dict[str, object]:
        counters = world.counters()
        counted = by_protocol(counters)
        node_seconds = self._swarm.node_seconds(now)
        figures: dict[str, object] = {}
        for kind in KINDS:
            sent = {protocol: count for (each, protocol), count in sorted(counted.items()) if each == kind}
            if sent:
                figures[f"sent_{kind}"] = sent
                if node_seconds > 0:
                    figures[f"sent_{kind}_per_node_second"] = known(sum(sent.values()) / node_seconds)
        figures["counters"] = {name: counters[name] for name in sorted(counters) if _parts(name) is None}
        return figures


def by_protocol(counters: Mapping[str, int]) -> dict[tuple[str, str], int]:
    """Return the counters keyed by (bytes or messages, protocol)."""
    return {parts: counters[name] for name in counters if (parts := _parts(name)) is not None}


def _parts(name: str) -> tuple[str, str] | None:
    kind, _, protocol = name.partition(" ")
    return (kind, short_protocol(protocol)) if protocol and kind in KINDS else None


def short_protocol(name: str) -> str:
    """Return the short name of a protocol: swim for `/peerloom/swim/1`."""
    parts = name.strip("/").split("/")
    return parts[1] if len(parts) == 3 else name
