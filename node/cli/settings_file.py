"""The file of settings for many nodes. A person writes it, and `peerloom config sign` signs it."""

from typing import Annotated, Any

import msgspec

from node import toml
from node.config import RULES, read_setting
from node.config_file import ResourcesTable
from node.errors import UsageError
from node.offering import FOLLOWABLE, OfferTable
from node.protocols.followed import SharedSetting


class SharedSettings(msgspec.Struct, frozen=True):
    """A file of settings for many nodes, as a person writes it, with tables as in node.toml."""

    version: Annotated[int, msgspec.Meta(ge=1, lt=2**53)]
    name: Annotated[str, msgspec.Meta(max_length=40)] = ""
    resources: ResourcesTable = ResourcesTable()
    offer: OfferTable = OfferTable()


def settings_in(wanted: toml.Document[SharedSettings]) -> tuple[SharedSetting, ...]:
    """Return the settings of a file, each checked. Raises UsageError with its line."""
    found = []
    for rule in RULES:
        table, _, key = ".".join(rule.key).rpartition(".")
        given: Any = getattr(getattr(wanted.value, table, None), key, None) if table else None
        if given is None:
            continue
        where = wanted.where(table, key)
        if rule.name not in FOLLOWABLE:
            raise UsageError(
                f"{where}: each owner decides {key}, so it cannot be set for others",
                f"these can: {', '.join(FOLLOWABLE)}",
            )
        texts = [str(each) for each in given] if isinstance(given, tuple) else [_text(given)]
        for text in texts:
            read_setting(f"{where}: {key}", text, rule.read)
        found.append(SharedSetting(rule.name, " ".join(texts)))
    return tuple(found)


def _text(value: str | int | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
