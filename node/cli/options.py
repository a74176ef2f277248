"""Options that several commands share: the data folder, `--json`, the help of a group."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from node.paths import ENVIRONMENT_PREFIX, default_data_dir, expand

GRAPH_SUFFIX = ".peerloom"
"""The suffix of a captured model's file."""
VALUES_SUFFIX = ".safetensors"
"""The suffix of the file of its initial values, in the same folder."""
DataDir = Annotated[str, typer.Option("--data-dir", metavar="DIR", help="The node's data folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of lines.")]

_SUMMARY_MAX = 1_000


class CommandGroup(TyperGroup):
    """A group whose help shows each command's whole summary, which typer would cut in mid-sentence."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        found = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [
            (name, command.get_short_help_str(_SUMMARY_MAX))
            for name, command in found
            if command is not None and not command.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def find_data_dir(context: typer.Context, flag: str) -> Path:
    """Return the data folder: from `status --data-dir X`, `--data-dir X status`, PEERLOOM_DATA_DIR, the
    config file, or the default, in this order."""
    before: dict[str, Any] = context.obj or {}
    given = flag or before.get("data_dir") or os.environ.get(f"{ENVIRONMENT_PREFIX}DATA_DIR")
    if given:
        return expand(given)
    config_file = before.get("config") or os.environ.get(f"{ENVIRONMENT_PREFIX}CONFIG")
    if config_file:
        from node.config import resolve  # imported here so that a client without a config file starts faster

        return resolve({"config": config_file}, os.environ).data_dir
    return default_data_dir(os.environ)
