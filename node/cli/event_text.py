"""Pieces of the lines about events: their time of day, and peers by their names."""

import time
from collections.abc import Mapping
from typing import Any

from node.cli.render import short_id

Event = Mapping[str, Any]


def at_clock(event: Event, text: str) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(event["at_seconds"]))
    return f"{clock}   {text}"


def name_and_id(names: Mapping[str, str], peer: str) -> str:
    """Return how screens call a peer: its name, where it has one, and its short id."""
    name = names.get(peer)
    return f"{name} {short_id(peer)}" if name else short_id(peer)


def with_names(text: str, names: Mapping[str, str]) -> str:
    """Return a text that names peers by short id with the name beside each, where there is one."""
    for peer in names:
        text = text.replace(short_id(peer), name_and_id(names, peer))
    return text
