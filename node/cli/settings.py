"""`peerloom config`: what the node on this machine gives to others; `config set` changes it at once."""

from typing import Annotated

import typer

from node.cli.client import ask
from node.cli.options import AsJson, CommandGroup, DataDir, find_data_dir
from node.cli.render import show, show_json

SIZES = "memory", "cores", "slots"
"""Rules by which an offer may become too small to be useful."""

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
    value: Annotated[str, typer.Argument(metavar="VALUE", help="As in node.toml: 22:00-07:00, 10m, 30%.")],
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """Change a rule by which this node serves others, at once and until it ends."""
    result = ask(find_data_dir(context, data_dir), "config.set", {"name": name, "value": value})
    if as_json:
        show_json({"schema": "peerloom/config/1", **result})
        return
    offer = result["offer"]
    now = "serves others" if offer["may_serve"] else f"serves no others now: {offer['reason']}"
    show([f"{result['name']} = {result['value'] or 'none'}; this machine {now}"])
    if name in SIZES:
        show([f"too small: {what}" for what in result["small"]])
    if offer["sends_less"]:
        show([f"sends less: {offer['sends_less']}"])
    if offer["unread"]:
        show([f"this machine cannot measure, so does not keep: {', '.join(offer['unread'])}"])
