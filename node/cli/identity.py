"""`peerloom id`: the identity of this node, whether or not it runs."""

import contextlib
import os
from typing import Any

import typer

from node.cli.client import ask, is_running
from node.cli.options import AsJson, DataDir, find_data_dir
from node.cli.render import labelled, show, show_json
from node.errors import NoNode, UsageError
from node.paths import short_path


def identity(context: typer.Context, data_dir: DataDir = "", as_json: AsJson = False) -> None:
    """Show this node's peer id, name and key file. The node need not run."""
    from crypto.identity import SEED_BYTES, Identity, peer_text
    from node.config import resolve
    from node.storage.folder import IDENTITY_NAME, FolderStorage
    from node.storage.keys import read_key

    folder = find_data_dir(context, data_dir)
    seed = None
    if folder.is_dir():
        storage = FolderStorage(folder)
        seed = read_key(storage, IDENTITY_NAME, SEED_BYTES)
    if seed is None:
        raise UsageError(
            f"no identity in {short_path(folder)} yet", "start the node once to make one: `peerloom`"
        )
    document: dict[str, Any] = {
        "schema": "peerloom/id/1",
        "peer": peer_text(Identity(seed).peer),
        "name": resolve({"config": (context.obj or {}).get("config")}, os.environ).name,
        "key_file": str(folder / IDENTITY_NAME),
        "running": False,
    }
    if is_running(folder):
        # A node that has just ended is not an error. The files then give the answer.
        with contextlib.suppress(NoNode):
            document |= {"name": ask(folder, "status")["name"], "running": True}
    if as_json:
        show_json(document)
        return
    key_file = (
        f"{short_path(document['key_file'])} (keep it secret: anybody with a copy can act as this node)"
    )
    show(
        [
            document["peer"],
            labelled("name", document["name"]),
            labelled("key file", key_file),
            labelled("running", "yes" if document["running"] else "no"),
        ]
    )
