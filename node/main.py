"""The command line: which commands there are, and what starts a node.

Each command has a file of its own, which loads what is heavy only when it runs. How errors become lines and
codes stands in `node.cli.errors`.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from node.cli import (
    autostart,
    chat,
    checkpoint,
    completion,
    data,
    dht,
    events,
    identity,
    init,
    keys,
    leave,
    model,
    page,
    peers,
    predict,
    receipts,
    report,
    runs,
    serve,
    settings,
    sim,
    status,
    top,
    train,
)
from node.cli.errors import DEBUG, dispatch
from node.cli.options import AsJson, CommandGroup, DataDir
from node.cli.plan import plan
from node.cli.render import show
from node.demo.command import demo
from node.doctor.command import doctor
from node.errors import EXIT_DONE, UsageError
from node.invocation import command_span, program

app = typer.Typer(
    cls=CommandGroup, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)
app.command("demo")(demo)
app.command("plan")(plan)
app.command("doctor")(doctor)
app.command("status")(status.status)
app.command("peers")(peers.peers)
app.command("receipts")(receipts.receipts)
app.command("page")(page.page)
app.command("events")(events.events)
app.command("report")(report.report)
app.command("top")(top.top)
app.command("id")(identity.identity)
app.command("train")(train.train)
app.command("predict")(predict.predict)
app.command("serve")(serve.serve)
app.command("generate")(serve.generate)
app.command("chat")(chat.chat)
app.command("services")(serve.services)
app.command("init")(init.init)
app.command("examples")(init.examples)
app.command("completion")(completion.completion)
app.add_typer(data.app, name="data")
app.add_typer(model.app, name="model")
app.add_typer(runs.app, name="runs")
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(dht.app, name="dht")
app.add_typer(settings.app, name="config")
app.add_typer(keys.app, name="keys")
app.add_typer(autostart.app, name="autostart")
app.command("leave")(leave.leave)
app.command("sim", context_settings=sim.PASSED_ON)(sim.simulate)

_ALSO_BEFORE_A_COMMAND = ("data_dir", "config")
"""Flags that mean the same before a command as behind it; all others only start a node."""

Text = str | None


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    join: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDR", help="Join through this peer: HOST, or HOST:PORT; port 9747 by default."
        ),
    ] = None,
    config: Annotated[Text, typer.Option(metavar="FILE", help="A TOML file of settings.")] = None,
    listen: Annotated[
        list[str] | None, typer.Option(metavar="ADDR", help="Listen here too (port 0: any free one).")
    ] = None,
    port: Annotated[
        Text, typer.Option(metavar="N", help="Listen at this port, or at the next that is free.")
    ] = None,
    announce: Annotated[
        list[str] | None, typer.Option(metavar="ADDR", help="Tell others this address instead.")
    ] = None,
    no_lan: Annotated[bool, typer.Option("--no-lan", help="Disable discovery on the local network.")] = False,
    name: Annotated[Text, typer.Option(metavar="NAME", help="What screens call this node.")] = None,
    data_dir: DataDir = "",
    swarm: Annotated[Text, typer.Option(metavar="NAME", help="Which swarm to join.")] = None,
    preset: Annotated[
        Text, typer.Option(metavar="lan|wan|host|local", help="Timers for this network.")
    ] = None,
    work_bits: Annotated[
        Text, typer.Option(metavar="N", help="Proof of work in every id of the swarm.")
    ] = None,
    device: Annotated[Text, typer.Option(metavar="auto|cpu|cuda:0|mps", help="Where to compute.")] = None,
    memory: Annotated[Text, typer.Option(metavar="12GB", help="How much memory to give; or 80%.")] = None,
    cores: Annotated[Text, typer.Option(metavar="N", help="How many cores to give; 0 is all.")] = None,
    location: Annotated[Text, typer.Option(metavar="PLACE", help="Where this machine stands.")] = None,
    own_data: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PATH", help="Train federated runs on this; it never leaves the machine."),
    ] = None,
    web: Annotated[
        Text,
        typer.Option(metavar="ADDR|off", help="Where this machine sees its page, and clients find models."),
    ] = None,
    web_cert: Annotated[Text, typer.Option(metavar="FILE", help="HTTPS: a certificate and its key.")] = None,
    web_proxy: Annotated[bool, typer.Option("--web-proxy", help="A proxy with TLS is before it.")] = False,
    log: Annotated[Text, typer.Option(metavar="off|text|json", help="Write events to events.log.")] = None,
    observer: Annotated[bool, typer.Option("--observer", help="Watch only: take no stage.")] = False,
    record: Annotated[
        Text, typer.Option("--record", metavar="FILE", help="Write down what comes in, for `sim replay`.")
    ] = None,
    require_join: Annotated[Text, typer.Option(metavar="30s", help="End if no peer answers in time.")] = None,
    as_json: AsJson = False,
    debug: Annotated[bool, typer.Option(DEBUG, help="Show the traceback of an error.")] = False,  # noqa: ARG001 - see dispatch
    version: Annotated[bool, typer.Option("--version", help="Print the version and end.")] = False,
) -> None:
    """Start a node. Without --join it starts a swarm, or finds the peers it met before."""
    flags: dict[str, Any] = {
        "join": join,
        "config": config,
        "listen": listen,
        "port": port,
        "announce": announce,
        "lan": False if no_lan else None,
        "name": name,
        "data_dir": data_dir or None,
        "swarm": swarm,
        "preset": preset,
        "work_bits": work_bits,
        "device": device,
        "memory": memory,
        "cores": cores,
        "location": location,
        "own_data": own_data,
        "web": web,
        "web_cert": web_cert,
        "web_proxy": web_proxy or None,
        "log": log,
        "observer": observer or None,
    }
    if version:
        _show_version()
    elif context.invoked_subcommand is not None:
        context.obj = {key: flags[key] for key in _ALSO_BEFORE_A_COMMAND}
        others = {"record": record, "require_join": require_join, "json": as_json or None}
        _refuse_start_flags(flags | others, context)
    else:
        from node.cli.start import start

        raise typer.Exit(start(flags, require_join=require_join, record=record, as_json=as_json))


def _refuse_start_flags(flags: dict[str, Any], context: typer.Context) -> None:
    command = context.invoked_subcommand
    for key, value in flags.items():
        if value not in (None, []) and key not in _ALSO_BEFORE_A_COMMAND:
            flag = "--no-lan" if key == "lan" else "--" + key.replace("_", "-")
            do = command_span(command or "", "--json" if key == "json" else "--help")
            raise UsageError(f"{flag} before '{command}': it belongs to starting a node", do)


def _show_version() -> None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        show([f"peerloom {version('peerloom')}"])
    except PackageNotFoundError:
        show(["peerloom, from a checkout that is not installed"])
    raise typer.Exit(EXIT_DONE)


def run(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code. Raises nothing."""
    return dispatch(app, arguments, program(), {"train": train.keys_as_flags})
