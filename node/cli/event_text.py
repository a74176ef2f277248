"""Parts of the lines about events: the time of day, and peers by name."""

import time
from collections.abc import Mapping
from typing import Any

from node.cli.render import short_id

Event = Mapping[str, Any]


def at_clock(event: Event, text: str) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(event["at_seconds"]))
    return f"{clock}   {text}"


def name_and_id(names: Mapping[str, str], peer: str) -> str:
    """Return a peer as shown on screens: its name, if it has one, and its short id."""
    name = names.get(peer)
    return f"{name} {short_id(peer)}" if name else short_id(peer)


def with_names(text: str, names: Mapping[str, str]) -> str:
    """Return a text that contains short ids, with the peer's name added to each, if it has one."""
    for peer in names:
        text = text.replace(short_id(peer), name_and_id(names, peer))
    return text
