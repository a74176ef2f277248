"""`peerloom keys`: keys with which programs may ask models through this node's HTTP API."""

from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from node.cli.client import NodeRefused, ask
from node.cli.options import AsJson, CommandGroup, DataDir, find_data_dir
from node.cli.render import show, show_json
from node.errors import PeerloomError

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Keys for programs that ask models through this node.",
)


@app.command("new")
def new(
    context: typer.Context,
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="What the key is for.")] = "",
    in_flight: Annotated[
        int, typer.Option("--in-flight", metavar="N", help="Maximum number of requests at a time; more wait.")
    ] = 16,
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """Make a key. It is shown only once, because the node keeps only a hash of it."""
    document = _ask(context, data_dir, "keys.new", {"name": name, "in_flight": in_flight})
    if as_json:
        show_json(document)
    else:
        show([document["key"]])


@app.command("list")
def list_keys(context: typer.Context, data_dir: DataDir = "", as_json: AsJson = False) -> None:
    """List the keys, without their secrets."""
    document = _ask(context, data_dir, "keys.list", {})
    if as_json:
        show_json(document)
        return
    rows = [
        f"{row['id']}  {datetime.fromtimestamp(row['made_at'], UTC):%Y-%m-%d}"
        f"  {row['in_flight_max']:>3} at once  {row['name'] or '-'}"
        for row in document["keys"]
    ]
    show(rows or ["no keys yet; make one: `peerloom keys new`"])


@app.command("revoke")
def revoke(
    context: typer.Context,
    key: Annotated[str, typer.Argument(metavar="KEY", help="The key's id or name.")],
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """Revoke a key. Answers that have begun continue."""
    document = _ask(context, data_dir, "keys.revoke", {"key": key})
    if as_json:
        show_json(document)
    else:
        show([f"key {document['id']} is revoked"])


def _ask(context: typer.Context, data_dir: str, command: str, arguments: dict[str, Any]) -> Any:
    folder = find_data_dir(context, data_dir)
    ask(folder, "status")
    try:
        return ask(folder, command, arguments)
    except NodeRefused as error:
        if "knows no command" not in error.what:
            raise
        raise PeerloomError("this node serves no clients", "start it without --web off") from error
