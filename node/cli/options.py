"""Which data folder a client command talks about: its flag, then as for the node itself."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from node.paths import ENVIRONMENT_PREFIX, default_data_dir, expand

GRAPH_SUFFIX = ".peerloom"
"""The suffix of a captured model's file."""
VALUES_SUFFIX = ".safetensors"
"""The suffix of the file of its first values, beside it."""
DataDir = Annotated[str, typer.Option("--data-dir", metavar="DIR", help="The node's data folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of lines.")]


def find_data_dir(context: typer.Context, flag: str) -> Path:
    """`status --data-dir X`, `--data-dir X status`, PEERLOOM_DATA_DIR, the config file, the default."""
    before: dict[str, Any] = context.obj or {}
    given = flag or before.get("data_dir") or os.environ.get(f"{ENVIRONMENT_PREFIX}DATA_DIR")
    if given:
        return expand(given)
    config_file = before.get("config") or os.environ.get(f"{ENVIRONMENT_PREFIX}CONFIG")
    if config_file:
        from node.config import resolve  # only here: a client without a config file starts faster

        return resolve({"config": config_file}, os.environ).data_dir
    return default_data_dir(os.environ)
