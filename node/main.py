"""The command line: its commands, and the flags that start a node.

Each command has its own file, which imports heavy modules only when the command runs. `node.cli.errors` turns
errors into lines and exit codes.
"""

from collections.abc import Sequence
from typing import Any

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
from node.cli.errors import dispatch
from node.cli.options import AsJson, CommandGroup, DataDir
from node.cli.plan import plan
from node.cli.render import show
from node.cli.start_flags import (
    Announce,
    ConfigFile,
    Cores,
    Debug,
    Device,
    Join,
    Listen,
    Location,
    Log,
    Memory,
    NodeName,
    NoLan,
    Observer,
    OwnData,
    Port,
    Preset,
    RecordFile,
    RequireJoin,
    SwarmName,
    Version,
    Web,
    WebCert,
    WebProxy,
    WorkBits,
)
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
"""Flags that mean the same before and after a command. All other flags before a command only start a node."""


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    join: Join = None,
    config: ConfigFile = None,
    listen: Listen = None,
    port: Port = None,
    announce: Announce = None,
    no_lan: NoLan = False,
    name: NodeName = None,
    data_dir: DataDir = "",
    swarm: SwarmName = None,
    preset: Preset = None,
    work_bits: WorkBits = None,
    device: Device = None,
    memory: Memory = None,
    cores: Cores = None,
    location: Location = None,
    own_data: OwnData = None,
    web: Web = None,
    web_cert: WebCert = None,
    web_proxy: WebProxy = False,
    log: Log = None,
    observer: Observer = False,
    record: RecordFile = None,
    require_join: RequireJoin = None,
    as_json: AsJson = False,
    debug: Debug = False,  # noqa: ARG001 - see dispatch
    version: Version = False,
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
        others = {"record": record, "require_join": require_join, "json": as_json or None}
        _keep_for_command(flags | others, context)
    else:
        _start(flags, require_join=require_join, record=record, as_json=as_json)


def _start(flags: dict[str, Any], **options: Any) -> None:
    from node.cli.start import start

    raise typer.Exit(start(flags, **options))


def _keep_for_command(flags: dict[str, Any], context: typer.Context) -> None:
    """Keep the flags that commands also take. Raises UsageError if a different flag was given."""
    context.obj = {key: flags[key] for key in _ALSO_BEFORE_A_COMMAND}
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
