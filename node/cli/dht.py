"""`peerloom dht`: the swarm's record table on the command line: get, put, find, stat."""

import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer

from node.cli.client import ask
from node.cli.options import AsJson, CommandGroup, DataDir, find_data_dir
from node.cli.render import bytes_text, labelled, seconds_text, short_id, show, show_json, table
from node.errors import UsageError
from node.quantities import read_bytes, read_duration, read_flops
from node.text import counted

ASK_SECONDS_MAX = 40.0
"""Time limit. The node's lookup takes at most 30 s."""

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Read and write the swarm's record table.",
)

Key = Annotated[str, typer.Argument(metavar="KEY", help="The name of the key.")]
Subkey = Annotated[
    str, typer.Option("--subkey", metavar="NAME", help="One of a node's several values under the key.")
]
Immutable = Annotated[bool, typer.Option("--immutable", help="The key is the hash of the value.")]


@app.command()
def get(
    context: typer.Context,
    key: Key,
    publisher: Annotated[
        str, typer.Option("--publisher", metavar="PEER", help="Only the value of this node.")
    ] = "",
    subkey: Subkey = "",
    immutable: Immutable = False,
    is_raw: Annotated[
        bool, typer.Option("--raw", help="Write the value's raw bytes, for a file or a program.")
    ] = False,
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """Print the newest value under a key, with control characters escaped; exit with 1 if there is none."""
    if is_raw and as_json:
        raise UsageError("dht get: --raw and --json are different forms", "leave out one of them")
    if immutable and (publisher or subkey):
        flag = "--publisher" if publisher else "--subkey"
        raise UsageError(
            f"dht get: {flag} has no effect with --immutable: the hash identifies the "
            "value, whoever stored it",
            "leave out one of them",
        )
    arguments = {"key": key, "publisher": publisher, "subkey": subkey, "immutable": immutable}
    result = ask(find_data_dir(context, data_dir), "dht.get", arguments, seconds=ASK_SECONDS_MAX)
    if as_json:
        show_json({"schema": "peerloom.dht-get/1"} | result)
    elif result["found"] and is_raw:
        sys.stdout.flush()
        sys.stdout.buffer.write(bytes.fromhex(result["value"]))
        sys.stdout.flush()
    elif result["found"]:
        sys.stdout.write(escaped(bytes.fromhex(result["value"])) + "\n")
        sys.stdout.flush()
    else:
        show([f"no value under {key}"], sys.stderr)
    if not result["found"]:
        raise typer.Exit(1)


@app.command()
def put(
    context: typer.Context,
    key: Annotated[str, typer.Argument(metavar="KEY", help="The key; leave it out with --immutable.")],
    value: Annotated[
        str, typer.Argument(metavar="VALUE", help="The value as text; - reads it from stdin.")
    ] = "",
    lifetime: Annotated[str, typer.Option("--ttl", metavar="1h", help="How long the value is kept.")] = "1h",
    subkey: Subkey = "",
    immutable: Immutable = False,
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """Store this node's value under a key; with --immutable under its own hash, which is printed."""
    seconds = _read("--ttl", lifetime, read_duration)
    if immutable and subkey:
        raise UsageError("dht put: --subkey has no effect with --immutable", "leave out one of them")
    if immutable and value:
        raise UsageError(
            f"dht put: with --immutable the key is the hash of the value, not {key[:40]!r}",
            "leave the key out: `peerloom dht put --immutable VALUE`",
        )
    if immutable:
        key, value = "-", key
    if not value:
        raise UsageError("dht put: the value is missing", "give it: `peerloom dht put KEY VALUE`")
    data = sys.stdin.buffer.read() if value == "-" else value.encode()
    arguments = {
        "key": key,
        "value": data.hex(),
        "ttl_seconds": seconds,
        "subkey": subkey,
        "immutable": immutable,
    }
    result = ask(find_data_dir(context, data_dir), "dht.put", arguments, seconds=ASK_SECONDS_MAX)
    if as_json:
        show_json({"schema": "peerloom.dht-put/1"} | result)
    else:
        name = result["key"] if immutable else key
        nodes = counted(result["holders"], "node")
        show([f"{name}: kept by {nodes} for {seconds_text(seconds)}"])


@app.command()
def find(
    context: typer.Context,
    device: Annotated[str, typer.Option("--device", metavar="cpu|cuda|mps", help="Kind of device.")] = "",
    memory: Annotated[str, typer.Option("--memory", metavar="8GB", help="Offering at least this much.")] = "",
    speed: Annotated[
        str, typer.Option("--speed", metavar="50GFLOPS", help="Measured to compute at least this fast.")
    ] = "",
    near: Annotated[
        str, typer.Option("--near", metavar="PLACE", help="In this location, as owners state it.")
    ] = "",
    count: Annotated[int, typer.Option("--count", metavar="N", help="Maximum number of nodes.")] = 20,
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """Search the whole swarm for nodes by what they offer, the nearest first."""
    arguments = {
        "device": device,
        "memory_bytes": _read("--memory", memory, read_bytes),
        "flops_per_second": _read("--speed", speed, read_flops),
        "near": near,
        "count": count,
    }
    result = ask(find_data_dir(context, data_dir), "dht.find", arguments, seconds=ASK_SECONDS_MAX)
    if as_json:
        show_json({"schema": "peerloom.dht-find/1"} | result)
    else:
        show(found_lines(result))


@app.command()
def stat(
    context: typer.Context,
    key: Annotated[str, typer.Argument(metavar="[KEY]", help="A key, to see how many nodes hold it.")] = "",
    data_dir: DataDir = "",
    as_json: AsJson = False,
) -> None:
    """Show this node's part of the table, or how many nodes hold the values under a key."""
    result = ask(find_data_dir(context, data_dir), "dht.stat", {"key": key}, seconds=ASK_SECONDS_MAX)
    if as_json:
        show_json({"schema": "peerloom.dht-stat/1"} | result)
    else:
        show(stat_lines(result))


def escaped(value: bytes) -> str:
    """Return a stranger's bytes as text: what is no letter is `\\xNN` or `\\uNNNN`, line breaks stay."""
    text = value.decode(errors="backslashreplace")
    return "".join(
        letter if letter.isprintable() or letter == "\n" else letter.encode("unicode_escape").decode()
        for letter in text
    )


def found_lines(document: Mapping[str, Any]) -> list[str]:
    """Return the screen of a `peerloom.dht-find/1` document."""
    if not document["nodes"]:
        return ["no answering node matches"]
    rows = [
        (
            short_id(node["peer"]),
            node["device"],
            bytes_text(node["memory_bytes"]),
            f"{node['flops_per_second'] / 1e9:.0f} GFLOP/s",
            "free" if node["has_slot"] else "taken",
            node["region"] or "-",
            f"{node['seconds'] * 1000:.0f} ms",
        )
        for node in document["nodes"]
    ]
    return table(("PEER", "DEVICE", "MEMORY", "SPEED", "SLOT", "PLACE", "ANSWERED IN"), rows)


def stat_lines(document: Mapping[str, Any]) -> list[str]:
    """Return the screen of a `peerloom.dht-stat/1` document, of a key or of the node."""
    if "holders" in document:
        values, holders = document["values"], document["holders"]
        noun = "value" if values == 1 else "values"
        return [f"{values} {noun}, held by {holders} of the nodes nearest to the key"]
    lines = [
        labelled("contacts", str(document["contacts"])),
        labelled("nodes", f"about {document['nodes_estimated']}"),
        labelled("records", f"{document['records']} held, {document['own_records']} own"),
        labelled("short", f"{counted(document['records_short'], 'store')} kept by too few nodes"),
    ]
    if document["is_client"]:
        lines.append(labelled("client", "other nodes cannot reach this node: it can ask, but holds nothing"))
    return lines


def _read(flag: str, text: str, read: Callable[[str], Any]) -> Any:
    # Imported here so that `dht get` starts faster.
    from node.config import read_setting

    return read_setting(flag, text, read) if text else 0
