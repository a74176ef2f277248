"""Client requests on the control channel: one struct for each command. Decoding checks types and bounds.

A handler takes its own request type; `command` wraps the handler for `node.control.ControlServer` and for the
web page's server, both of which pass arguments unchecked. Fields that a struct does not name are ignored, so
that an older node can serve a newer client.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from node.control import CommandHandler, Emit
from node.errors import UsageError, split_place

NUMBER_MAX = 2**53
"""JSON numbers represent whole numbers exactly up to this value."""
STEP_MAX = 2**52
"""The highest step that a manifest may name."""
TEXTS_MAX = 1_024
"""Maximum length of a list of texts; far above the number of event kinds or of peers named in one request."""

Number = Annotated[float, Meta(ge=-NUMBER_MAX, le=NUMBER_MAX)]
Text = Annotated[str, Meta(max_length=65_536)]
"""A name, a word or a path. The limit is far above any real length."""
Texts = Annotated[tuple[Text, ...], Meta(max_length=TEXTS_MAX)]
Given = Annotated[str, Meta(min_length=1, max_length=65_536, pattern=r"^[^\0]+\Z")]
"""A name or a path that must not be empty."""

R = TypeVar("R", bound=Struct)


class Nothing(Struct, frozen=True):
    """A request without arguments."""


class EventsRequest(Struct, frozen=True):
    """Events since `since` (Unix seconds; None: from now on), of the given kinds (empty: all), that contain
    `text`. With `follow`, also later events, until the client disconnects."""

    since: Number | None = None
    kinds: Texts = ()
    text: Text = ""
    follow: bool = True


class Prepared(Struct, frozen=True):
    """A run that `peerloom train` or a program has prepared, with the locations of its files.

    `run` is a checked RUN.toml, or `text` an unchecked one. `path` is the file's location, and other paths
    are relative to it; error messages call the file `name`. `graph` and `values` are the captured model,
    `data` is a folder of converted samples, and `folder` the Hugging Face folder that the model came from.
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
    """Start a run; wait up to `wait_seconds` if it needs more peers."""

    wait_seconds: Number = 0.0
    follow: bool = True


class NamedRun(Struct, frozen=True):
    """A run, identified by a prefix of its id."""

    run: Text = ""


class TraceRequest(NamedRun, frozen=True):
    """The newest `steps` steps of a run."""

    steps: Number = 4.0


REVISABLE = ("learning_rate", "steps", "priority", "samples_per_second", "goal_seconds")
"""The fields of `ReviseRequest` that are also fields of a revision."""


class ReviseRequest(NamedRun, frozen=True):
    """Changes to a run; None leaves a field unchanged. `node.protocols.revision.check_changes` defines the
    bounds."""

    is_paused: bool | None = None
    learning_rate: Any = None
    steps: Any = None
    priority: Any = None
    samples_per_second: Any = None
    goal_seconds: Any = None


class FetchRequest(NamedRun, frozen=True, kw_only=True):
    """Write a run's weights to `out`, and what is kept of its Hugging Face folder to `folder`."""

    out: Given
    folder: Text = ""


class InviteRequest(NamedRun, frozen=True):
    """Invite a peer to the averaging run with this name; the invitation is valid for `hours`."""

    peer: Text = ""
    hours: Number = 168.0
    admit: Text = ""


class RevokeRequest(NamedRun, frozen=True):
    """Revoke a peer's tickets."""

    peer: Text = ""


class SetRequest(Struct, frozen=True):
    """Change one of this node's rules until the node stops."""

    name: Text = ""
    value: Text = ""


class DhtGetRequest(Struct, frozen=True):
    """Look up a value: by its hash if `immutable`, else by key, publisher and sub-key."""

    key: Text = ""
    publisher: Text = ""
    subkey: Text = ""
    immutable: bool = False


class DhtPutRequest(Struct, frozen=True):
    """Store a value, given in hexadecimal, for `ttl_seconds`."""

    key: Text = ""
    value: str = ""
    subkey: Text = ""
    ttl_seconds: Number = 3600.0
    immutable: bool = False


class DhtFindRequest(Struct, frozen=True):
    """Find nodes by their hardware."""

    device: Text = ""
    memory_bytes: Number = 0.0
    near: Text = ""
    count: Number = 20.0
    flops_per_second: Number = 0.0


class DhtStatRequest(Struct, frozen=True):
    """Return how many nodes hold a key; without a key, return statistics of this node's DHT."""

    key: Text = ""


class AuditRequest(NamedRun, frozen=True):
    """Recompute frames of a committed step. `step` None or negative: the newest step that can be
    recomputed."""

    step: Annotated[int, Meta(le=STEP_MAX)] | None = None


class ExportRequest(NamedRun, frozen=True, kw_only=True):
    """Write a checkpoint to `out`: that of `step`, or the newest if `step` is None."""

    out: Given
    step: Annotated[int, Meta(ge=0, le=STEP_MAX)] | None = None


class FetchCheckpointRequest(NamedRun, frozen=True):
    """Fetch a checkpoint from these members, or from any member that has it."""

    step: Annotated[int, Meta(ge=0, le=STEP_MAX)] | None = None
    holders: Texts = field(default=(), name="from")


def read_request(kind: type[R], arguments: Mapping[str, Any]) -> R:
    """Return a client's request as a struct. Raises UsageError that names the faulty argument."""
    try:
        return msgspec.convert(dict(arguments), kind)
    except msgspec.ValidationError as error:
        said, place = split_place(str(error))
        name = place.partition("[")[0]
        raise UsageError(f"{name}: {said[:1].lower()}{said[1:]}" if name else said) from None


def command(kind: type[R], perform: Callable[[R, Emit], Awaitable[object]]) -> CommandHandler:
    """Return a handler that decodes a client's arguments and calls `perform`."""

    async def handler(arguments: dict[str, Any], emit: Emit) -> object:
        return await perform(read_request(kind, arguments), emit)

    return handler
