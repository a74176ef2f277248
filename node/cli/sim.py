"""`peerloom sim`: the simulator's own command line, also available under this name.

The simulator is a layer above the node, so nothing here may import it. It is loaded by name on request.
"""

from importlib import import_module

import typer

from node.errors import UsageError
from node.shadowing import remedy, shadow_of_ours, shadow_text

COMMAND_LINE = "sim.cli"
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Settings that pass every flag, even --help, to the simulator as it was typed."""


def simulate(context: typer.Context) -> None:
    """Try a whole swarm in virtual time; `sim --list` names the scenarios."""
    try:
        command_line = import_module(COMMAND_LINE)
    except ModuleNotFoundError as error:
        if error.name not in ("sim", COMMAND_LINE):
            raise
        if (found := shadow_of_ours(("sim",))) is not None:
            raise UsageError(shadow_text(*found), remedy()) from None
        raise UsageError(
            "the simulator is not installed here", "install the complete peerloom package"
        ) from None
    raise typer.Exit(command_line.call(context.args, context.command_path))
