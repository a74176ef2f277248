"""The flags that start a node, as `node.main.main` takes them, with their help."""

from typing import Annotated

import typer

from node.cli.errors import DEBUG

Text = str | None

Join = Annotated[
    list[str] | None,
    typer.Option(metavar="ADDR", help="Join through this peer: HOST or HOST:PORT; default port 9747."),
]
ConfigFile = Annotated[Text, typer.Option(metavar="FILE", help="A TOML file of settings.")]
Listen = Annotated[
    list[str] | None, typer.Option(metavar="ADDR", help="Listen here too (port 0: any free one).")
]
Port = Annotated[Text, typer.Option(metavar="N", help="Listen at this port, or at the next free one.")]
Announce = Annotated[list[str] | None, typer.Option(metavar="ADDR", help="Announce this address instead.")]
NoLan = Annotated[bool, typer.Option("--no-lan", help="Disable discovery on the local network.")]
NodeName = Annotated[Text, typer.Option(metavar="NAME", help="This node's name on screens.")]
SwarmName = Annotated[Text, typer.Option(metavar="NAME", help="Which swarm to join.")]
Preset = Annotated[Text, typer.Option(metavar="lan|wan|host|local", help="Timers for this network.")]
WorkBits = Annotated[Text, typer.Option(metavar="N", help="Proof of work in every id of the swarm.")]
Device = Annotated[Text, typer.Option(metavar="auto|cpu|cuda:0|mps", help="Where to compute.")]
Memory = Annotated[Text, typer.Option(metavar="12GB", help="How much memory to offer; or 80%.")]
Cores = Annotated[Text, typer.Option(metavar="N", help="How many cores to offer; 0: all.")]
Location = Annotated[Text, typer.Option(metavar="PLACE", help="Location of this machine.")]
OwnData = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=PATH", help="Train federated runs on this; it never leaves the machine."),
]
Web = Annotated[
    Text,
    typer.Option(metavar="ADDR|off", help="Address of the web page and of the API for models."),
]
WebCert = Annotated[Text, typer.Option(metavar="FILE", help="HTTPS: a certificate and its key.")]
WebProxy = Annotated[bool, typer.Option("--web-proxy", help="There is a TLS proxy in front.")]
Log = Annotated[Text, typer.Option(metavar="off|text|json", help="Write events to events.log.")]
Observer = Annotated[bool, typer.Option("--observer", help="Only watch: take no stages.")]
RecordFile = Annotated[
    Text, typer.Option("--record", metavar="FILE", help="Record all incoming messages, for `sim replay`.")
]
RequireJoin = Annotated[Text, typer.Option(metavar="30s", help="End if no peer answers in time.")]
Debug = Annotated[bool, typer.Option(DEBUG, help="Show the traceback of an error.")]
Version = Annotated[bool, typer.Option("--version", help="Print the version and end.")]
