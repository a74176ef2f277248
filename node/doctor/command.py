"""`peerloom doctor [ADDR]`: checks step by step what works from here, with a remedy for each failure."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from node.cli.options import AsJson, DataDir
from node.cli.render import show, show_json
from node.errors import CheckFailed
from node.text import counted

if TYPE_CHECKING:  # the command line loads this file for every command
    from node.doctor.steps import Steps


def doctor(
    context: typer.Context,
    address: Annotated[
        str | None, typer.Argument(metavar="[ADDR]", help="Also check the connection to this node.")
    ] = None,
    data_dir: DataDir = "",
    listen: Annotated[
        list[str] | None, typer.Option(metavar="ADDR", help="Address to listen on, as for the node.")
    ] = None,
    swarm: Annotated[str | None, typer.Option(metavar="NAME", help="The swarm of the node.")] = None,
    no_lan: Annotated[bool, typer.Option("--no-lan", help="Do not use the local network.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check what works on this machine, and from here to ADDR. Exit code 6 if a check failed."""
    import trio

    from node import config
    from node.addresses import read_address
    from node.doctor.local_checks import Scene, look_here
    from node.doctor.remote_checks import look_there
    from node.doctor.steps import Steps

    there = None if address is None else config.read_setting("doctor", address, read_address)
    before: dict[str, Any] = context.obj or {}
    flags: dict[str, Any] = {
        "config": before.get("config"),
        "data_dir": data_dir or before.get("data_dir"),
        "listen": listen,
        "swarm": swarm,
        "lan": False if no_lan else None,
    }
    steps = Steps(lambda step: None if as_json else show(step_lines(step.document)))

    async def look() -> None:
        settings = config.Config()

        async def read() -> str:
            nonlocal settings
            settings = config.resolve(flags, os.environ)
            return f"swarm '{settings.swarm.name}', listening at " + ", ".join(
                each.short for each in settings.listen.addresses
            )

        # If the config cannot be read, nothing else can be checked.
        if not await steps.check("config", read):
            return
        scene = Scene(settings)
        await look_here(steps, scene)
        if there is not None:
            await look_there(steps, scene, there)

    trio.run(look)
    if as_json:
        show_json(checks_document(steps))
    else:
        show([conclusion(len(steps.all), len(steps.failed), there is None)])
    if steps.failed:
        raise typer.Exit(CheckFailed.exit_code)


def checks_document(steps: "Steps") -> dict[str, Any]:
    """Return all checks as a `peerloom/doctor/1` document."""
    return {
        "schema": "peerloom/doctor/1",
        "ok": not steps.failed,
        "steps": [step.document for step in steps.all],
    }


def step_lines(step: Mapping[str, Any]) -> list[str]:
    """Return the lines for one step of a `peerloom/doctor/1` document."""
    lines = [f"{step['outcome']:<8} {step['name']:<20} {step['detail']}"]
    if step["remedy"]:
        lines.append(f"  do: {step['remedy']}")
    return lines


def conclusion(count: int, failed: int, is_here_only: bool) -> str:
    """Return the last line of the report."""
    if failed:
        return f"{failed} of {counted(count, 'check')} failed"
    more = "; to look at the way to another node: `peerloom doctor ADDR`" if is_here_only else ""
    return f"nothing is wrong in {counted(count, 'check')}{more}"
