"""`peerloom page`: the link to this node's web page, with the token that its views and actions need."""

import typer

from node.cli.client import NodeRefused, ask
from node.cli.options import AsJson, DataDir, find_data_dir
from node.cli.render import show, show_json
from node.errors import PeerloomError


def page(context: typer.Context, data_dir: DataDir = "", as_json: AsJson = False) -> None:
    """Show the link to this node's web page. Anybody who has the link can see the page, and stop runs
    here."""
    try:
        document = ask(find_data_dir(context, data_dir), "page")
    except NodeRefused as error:
        raise PeerloomError("this node has no page", "start it without --web off") from error
    if as_json:
        show_json(document)
    else:
        show([document["link"]])
