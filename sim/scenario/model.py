"""The parts of a scenario: a frozen struct for each table of its file. Not here: reading a file
(`sim.scenario.loading`), and the rules between values (`sim.scenario.rules`)."""

from typing import Annotated, Literal

import msgspec

from sim.churn.model import Churn, ChurnEvent
from sim.network.model import NetworkModel, Seconds, Share

NODES_MAX = 100_000
Count = Annotated[int, msgspec.Meta(ge=0)]


class SwarmStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The start of the swarm: peers start within `spread_seconds`, and each joins through one that already
    runs. A share `late_share` is kept back for an event of kind `join`. `acquainted`: no peer joins; the
    first peers already know each other, so that the costly start of a large swarm need not be simulated."""

    spread_seconds: Seconds = 20.0
    late_share: Share = 0.0
    acquainted: bool = False


class MembershipScenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """SWIM settings. `scope`: all, or the neighbourhood of the peer's id as in a public swarm."""

    preset: Literal["local", "host", "lan", "wan"] = "lan"
    scope: Literal["all", "neighbourhood"] = "all"


class RecordsScenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The load on the DHT: records stored and looked up per second in the whole swarm."""

    enabled: bool = True
    stores_per_second: Annotated[float, msgspec.Meta(ge=0)] = 0.2
    lookups_per_second: Annotated[float, msgspec.Meta(ge=0)] = 1.0
    republish_seconds: Seconds = 1800.0
    lifetime_seconds: Seconds = 7200.0


class TrainingScenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One run: its members and its shape. It has `members` members, the permanent peers first.

    In a world of cores a stage sums integers, so that every sample can be traced. In a stack it is the named
    model with the named data, with real arithmetic. `pass_seconds` is the time of a forward pass at a peer of
    speed 1; a backward pass takes twice that.
    """

    members: Annotated[int, msgspec.Meta(ge=1, le=100)] = 6
    stages: Annotated[int, msgspec.Meta(ge=1, le=16)] = 2
    replicas: Annotated[int, msgspec.Meta(ge=1, le=16)] = 2
    trainers: Annotated[int, msgspec.Meta(ge=1, le=8)] = 1
    steps: Annotated[int, msgspec.Meta(ge=1)] = 20
    microbatches: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 8
    at_seconds: Seconds = 30.0
    pass_seconds: Seconds = 0.02
    checkpoint_every: Count = 5
    on_lost_quorum: Literal["wait", "fork", "requester"] = "wait"
    model: str = "simple-cnn"
    data: str = "digits"
    learning_rate: float = 0.005
    accuracy: Share = 0.0
    """The run breaks an invariant if its final accuracy is below this; 0: no check."""


class ServedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model served in a world of cores by `members` peers, the permanent ones first. Each may hold a stage
    and sends prompts. A stage hashes tokens, so that each answer can be checked.

    `pass_seconds` is the time for a token in a stage at a peer of speed 1, `prompt` the mean length of
    prompts in tokens, `tokens` the length of each answer, `stages_each` how many stages a peer has room for.
    """

    members: Annotated[int, msgspec.Meta(ge=1, le=64)] = 12
    stages: Annotated[int, msgspec.Meta(ge=1, le=16)] = 2
    replicas: Annotated[int, msgspec.Meta(ge=1, le=16)] = 2
    stages_each: Annotated[int, msgspec.Meta(ge=1, le=8)] = 2
    answers_per_second: Annotated[float, msgspec.Meta(gt=0)] = 0.5
    tokens: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 40
    prompt: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 32
    pass_seconds: Seconds = 0.02
    load_seconds: Seconds = 5.0
    at_seconds: Seconds = 30.0


class LocalTraining(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run in local mode in a world of cores. Columns of `stages` train separately and are averaged. The
    members are `members` peers, the permanent ones first, each with one slot. The state of a stage is its
    number of steps.

    `replicas` is the number of wanted columns, 0 for as many as possible. `step_seconds` is the time of a
    step at a peer of speed 1, `open_seconds` the time to open a stage.
    """

    members: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4
    stages: Annotated[int, msgspec.Meta(ge=1, le=16)] = 2
    replicas: Annotated[int, msgspec.Meta(ge=0, le=16)] = 2
    steps: Annotated[int, msgspec.Meta(ge=1)] = 60
    local_steps: Annotated[int, msgspec.Meta(ge=1)] = 4
    patience: Count = 0
    save_every: Count = 5
    step_seconds: Seconds = 0.5
    open_seconds: Seconds = 3.0
    at_seconds: Seconds = 30.0


class Checks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The bounds of the invariants. `converge_seconds`: the time after the latest disturbance within which
    all live peers must list exactly each other; 0 turns this off, as under endless churn."""

    converge_seconds: Seconds = 0.0
    false_deaths: bool = False
    """Whether a peer that was up and reachable must never be declared dead."""
    found_share: Share = 0.0
    """Minimum share of lookups of an existing record that must find it."""


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All tables of a scenario. `fidelity`: with cores, only the protocol cores run, for thousands of peers;
    with stack, whole nodes run, up to about a hundred, with real arithmetic."""

    name: str
    about: str
    fidelity: Literal["cores", "stack"] = "cores"
    nodes: Annotated[int, msgspec.Meta(ge=1, le=NODES_MAX)] = 100
    seconds: Annotated[float, msgspec.Meta(gt=0)] = 600.0
    signatures: Literal["hash", "ed25519"] = "hash"
    encoded: bool = False
    """Whether messages of cores are really encoded, which slows the simulation by a third."""
    sample_seconds: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    start: SwarmStart = SwarmStart()
    network: NetworkModel = NetworkModel()
    churn: Churn = Churn()
    events: tuple[ChurnEvent, ...] = ()
    membership: MembershipScenario = MembershipScenario()
    records: RecordsScenario = RecordsScenario()
    runs: tuple[TrainingScenario, ...] = ()
    services: tuple[ServedModel, ...] = ()
    local_runs: tuple[LocalTraining, ...] = ()
    checks: Checks = Checks()
