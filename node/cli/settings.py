"""`peerloom config`: the offer of the node on this machine; `config set` changes it immediately.

`config sign` and `config publish` set it for all nodes that follow a key (`node.following`).
"""

import os
from pathlib import Path
from typing import Annotated

import typer

from node.cli.client import ask
from node.cli.options import AsJson, CommandGroup, DataDir, find_data_dir
from node.cli.render import short_id, show, show_json
from node.errors import UsageError
from node.paths import short_path

SIZES = "memory", "cores", "slots"
"""Rules that can make an offer too small to be useful."""
SIGNED_SUFFIX = ".signed"


app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Change the rules by which the node serves others.",
)


@app.command("set")
def set_rule(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="memory, cores, slots, hours, upload, ...")],
    value: Annotated[
        str, typer.Argument(metavar="VALUE", help="A value as in node.toml: 22:00-07:00, 10m, 30%.")
    ],
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """Change a rule by which this node serves others, immediately and until the node stops."""
    result = ask(find_data_dir(context, data_dir), "config.set", {"name": name, "value": value})
    if as_json:
        show_json({"schema": "peerloom/config/1", **result})
        return
    offer = result["offer"]
    now = "serves others" if offer["may_serve"] else f"does not serve others now: {offer['reason']}"
    show([f"{result['name']} = {result['value'] or 'none'}; this machine {now}"])
    if name in SIZES:
        show([f"too small: {what}" for what in result["small"]])
    if offer["sends_less"]:
        show([f"sends less: {offer['sends_less']}"])
    if offer["unread"]:
        show(
            [f"this machine cannot measure these rules, so does not apply them: {', '.join(offer['unread'])}"]
        )


@app.command("sign")
def sign(
    context: typer.Context,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="The file: version = 3, name, [offer] and [resources].")
    ],
    out: Annotated[str, typer.Option("--out", metavar="FILE", help="Else FILE.signed.")] = "",
    swarm: Annotated[
        str, typer.Option("--swarm", metavar="NAME", help="Default: the one in node.toml.")
    ] = "",
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """Sign settings with this data folder's key, for nodes that follow it. The node need not run."""
    from crypto.facts import IdentitySigner
    from crypto.identity import SEED_BYTES, Identity
    from node import toml
    from node.cli.settings_file import SharedSettings, settings_in
    from node.config import resolve
    from node.protocols.followed import SettingsBody, file_of, sign_settings
    from node.storage.folder import IDENTITY_NAME, FolderStorage
    from node.storage.keys import read_key

    folder = find_data_dir(context, data_dir)
    wanted = toml.read(Path(file), SharedSettings)
    settings = settings_in(wanted)
    seed = read_key(FolderStorage(folder), IDENTITY_NAME, SEED_BYTES) if folder.is_dir() else None
    if seed is None:
        raise UsageError(f"no key in {short_path(folder)}", "start a node once to make one: `peerloom`")
    given = {"config": (context.obj or {}).get("config"), "swarm": swarm or None}
    signed_for = resolve(given, os.environ).swarm.name
    signer = IdentitySigner(Identity(seed), signed_for)
    body = SettingsBody(wanted.value.version, wanted.value.name, settings)
    path = Path(out or file + SIGNED_SUFFIX)
    try:
        path.write_bytes(file_of(sign_settings(signer, body), body.version))
    except OSError as error:
        raise UsageError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    if as_json:
        rows = {each.name: each.value for each in settings}
        show_json(
            {"schema": "peerloom/signed/1", "file": str(path), "version": body.version, "settings": rows}
        )
        return
    said = f"{path}: version {body.version} for swarm {signed_for}"
    show([f"{said}; publish it: `peerloom config publish {path}`"])


@app.command("publish")
def publish(
    context: typer.Context,
    file: Annotated[str, typer.Argument(metavar="FILE", help="The file that `config sign` wrote.")],
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """Publish signed settings through the node on this machine, to all nodes that follow their key."""
    from node import toml

    text = toml.read_text(Path(file))
    found = ask(find_data_dir(context, data_dir), "config.publish", {"document": text})
    if as_json:
        show_json({"schema": "peerloom/published/1", **found})
        return
    whose = found["name"] or short_id(found["key"])
    show(
        [f"version {found['version']} of {whose} is published; nodes that follow it apply it within seconds"]
    )
    if not found["is_stored"]:
        show([f"it is stored again when more nodes join: {found['reason']}"])
