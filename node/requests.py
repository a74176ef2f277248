"""Requests of clients over the control channel: a struct for each command, typed and bounded by decoding.

A handler takes its own request; `command` wraps it for `node.control.ControlServer` and the page, which pass
the arguments as received. Fields that a struct does not name are ignored, so that an older node serves a
newer client.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from node.control import CommandHandler, Emit
from node.errors import UsageError, split_place

NUMBER_MAX = 2**53
"""Whole numbers are exact up to here in JSON."""
STEP_MAX = 2**52
"""The last step that a manifest may name."""
TEXTS_MAX = 1_024
"""More kinds of events, or peers, than there are of any."""

Number = Annotated[float, Meta(ge=-NUMBER_MAX, le=NUMBER_MAX)]
Text = Annotated[str, Meta(max_length=65_536)]
"""A name, a word or a path, and far longer than any."""
Texts = Annotated[tuple[Text, ...], Meta(max_length=TEXTS_MAX)]
Given = Annotated[str, Meta(min_length=1, max_length=65_536, pattern=r"^[^\0]+\Z")]
"""A name or a path that must be there."""

R = TypeVar("R", bound=Struct)


class Nothing(Struct, frozen=True):
    """A request without arguments."""


class EventsRequest(Struct, frozen=True):
    """Events since a time (Unix seconds; none: of now on) of some kinds (none: all) that contain a text; with
    `follow`, also each later one until the client hangs up."""

    since: Number | None = None
    kinds: Texts = ()
    text: Text = ""
    follow: bool = True


class Prepared(Struct, frozen=True):
    """A run that `peerloom train`, or a program, has prepared: where its files lie.

    `run` is a checked RUN.toml, or `text` an unchecked one. `path` is where it lies, from which other paths
    are meant; errors call it `name`. `graph` and `values` are the captured model, `data` is a folder of
    converted samples, `folder` the Hugging Face folder that the model came from.
    """

    name: Text = "RUN.toml"
    path: Text = ""
    run: dict[str, Any] | None = None
    text: str = ""
    graph: Text = ""
    values: Text | None = None
    data: Text = ""
    folder: Text = ""


class TrainRequest(Prepared, frozen=True):
    """Begin a run; wait so long (seconds) for peers that it lacks."""

    wait_seconds: Number = 0.0
    follow: bool = True


class NamedRun(Struct, frozen=True):
    """A run, by how its id begins."""

    run: Text = ""


class TraceRequest(NamedRun, frozen=True):
    """The newest so many steps of a run."""

    steps: Number = 4.0


REVISABLE = ("learning_rate", "steps", "priority", "samples_per_second", "goal_seconds")
"""Fields of `ReviseRequest` that are fields of a revision."""


class ReviseRequest(NamedRun, frozen=True):
    """Changes to a run; None leaves as it is. Bounds are those of `node.protocols.revision.check_changes`."""

    is_paused: bool | None = None
    learning_rate: Any = None
    steps: Any = None
    priority: Any = None
    samples_per_second: Any = None
    goal_seconds: Any = None


class FetchRequest(NamedRun, frozen=True, kw_only=True):
    """Write a run's weights into `out`, and what is kept of its Hugging Face folder into `folder`."""

    out: Given
    folder: Text = ""


class InviteRequest(NamedRun, frozen=True):
    """Invite a peer to an averaging run, called by its name, for so many hours."""

    peer: Text = ""
    hours: Number = 168.0
    admit: Text = ""


class RevokeRequest(NamedRun, frozen=True):
    """Revoke the tickets of a peer."""

    peer: Text = ""


class SetRequest(Struct, frozen=True):
    """Change a rule of this node until it ends."""

    name: Text = ""
    value: Text = ""


class DhtGetRequest(Struct, frozen=True):
    """Look for a value: by its hash where `immutable`, else by key, publisher and sub-key."""

    key: Text = ""
    publisher: Text = ""
    subkey: Text = ""
    immutable: bool = False


class DhtPutRequest(Struct, frozen=True):
    """Keep a value, which is in hexadecimal, for so many seconds."""

    key: Text = ""
    value: str = ""
    subkey: Text = ""
    ttl_seconds: Number = 3600.0
    immutable: bool = False


class DhtFindRequest(Struct, frozen=True):
    """Nodes by their hardware."""

    device: Text = ""
    memory_bytes: Number = 0.0
    near: Text = ""
    count: Number = 20.0
    flops_per_second: Number = 0.0


class DhtStatRequest(Struct, frozen=True):
    """Return how many nodes hold a key, or statistics of this node's DHT."""

    key: Text = ""


class AuditRequest(NamedRun, frozen=True):
    """Compute frames of a committed step again; none, or a negative one: the newest that can be."""

    step: Annotated[int, Meta(le=STEP_MAX)] | None = None


class ExportRequest(NamedRun, frozen=True, kw_only=True):
    """Write a checkpoint into `out`; without a step the newest."""

    out: Given
    step: Annotated[int, Meta(ge=0, le=STEP_MAX)] | None = None


class FetchCheckpointRequest(NamedRun, frozen=True):
    """Fetch a checkpoint from these members, or from who has it."""

    step: Annotated[int, Meta(ge=0, le=STEP_MAX)] | None = None
    holders: Texts = field(default=(), name="from")


def read_request(kind: type[R], arguments: Mapping[str, Any]) -> R:
    """Return what a client asks. Raises UsageError, which names the argument."""
    try:
        return msgspec.convert(dict(arguments), kind)
    except msgspec.ValidationError as error:
        said, place = split_place(str(error))
        name = place.partition("[")[0]
        raise UsageError(f"{name}: {said[:1].lower()}{said[1:]}" if name else said) from None


def command(kind: type[R], perform: Callable[[R, Emit], Awaitable[object]]) -> CommandHandler:
    """Return the handler that reads a client's arguments and serves the request."""

    async def handler(arguments: dict[str, Any], emit: Emit) -> object:
        return await perform(read_request(kind, arguments), emit)

    return handler
