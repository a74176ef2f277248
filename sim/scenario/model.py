"""The parts of a scenario: a frozen struct for each table of its file. Not here: reading a file
(`sim.scenario.loading`), and the rules between values (`sim.scenario.rules`)."""

from typing import Annotated, Literal

import msgspec

from sim.churn.model import Churn, ChurnEvent
from sim.network.model import NetworkModel, Seconds, Share

NODES_MAX = 100_000
Count = Annotated[int, msgspec.Meta(ge=0)]


class SwarmStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The start of the swarm: peers start within `spread_seconds`, each through one that already runs. A
    share `late_share` is kept back for an event of kind `join`. `acquainted`: nobody joins; the first peers
    already know each other, so that the birth of a large swarm need not be played."""

    spread_seconds: Seconds = 20.0
    late_share: Share = 0.0
    acquainted: bool = False


class MembershipScenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """SWIM. `scope`: all, or the neighbourhood of the peer's id as in a public swarm."""

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
    """One run: its members and its shape. The members are `members` peers, the permanent ones first.

    In a world of cores a stage sums integers, so that every sample can be traced; in a stack it is the named
    model on the named data, with real arithmetic. `pass_seconds` is the time of a forward pass at a peer of
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
    """The accuracy below which the scenario's run counts as broken; 0: none."""


class ServedModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model served in a world of cores by `members` peers, the permanent ones first, each of which may hold
    a stage and sends prompts. A stage hashes tokens, so that each answer can be checked.

    `pass_seconds` is what a token takes in a stage at a peer of speed 1, `prompt` the mean of prompts in
    tokens, `tokens` what each answer has, `stages_each` how many stages a peer has room for.
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
    """A run in local mode in a world of cores: columns of `stages` train apart and are averaged, among
    `members` peers from the permanent ones on, each of which has one slot. Stages are counted steps.

    `replicas` columns are wanted, 0 for as many as there can be. `step_seconds` is what a step takes at a
    peer of speed 1, `open_seconds` how long it opens a stage.
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
    """The bounds of the invariants. `converge_seconds`: at the latest this long after the last disturbance
    all live peers list exactly each other; 0 turns this off, as in endless churn."""

    converge_seconds: Seconds = 0.0
    false_deaths: bool = False
    """Whether a peer that was up and reachable must never be declared dead."""
    found_share: Share = 0.0
    """The least share of lookups that find an existing record."""


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`fidelity`: cores drives the protocol machines alone, thousands of peers; stack runs whole nodes, up to
    about a hundred, with real arithmetic."""

    name: str
    about: str
    fidelity: Literal["cores", "stack"] = "cores"
    nodes: Annotated[int, msgspec.Meta(ge=1, le=NODES_MAX)] = 100
    seconds: Annotated[float, msgspec.Meta(gt=0)] = 600.0
    signatures: Literal["hash", "ed25519"] = "hash"
    encoded: bool = False
    """Whether messages of cores are really encoded, which costs a third of the speed."""
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
