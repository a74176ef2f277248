"""The events of a node, frozen. Screens, `--json`, metrics and the simulator's report are made from events
alone (ARCHITECTURE law 5).

Shells emit events; `node.state.apply` folds them into the state. An event is named in the past tense, carries
`at` (Unix seconds) and plain values, and never changes after it has happened. New kinds may be added; none is
renamed. `node.event_kinds` lists all kinds, including those defined in other modules.
"""

from typing import ClassVar

import msgspec

from crypto.identity import PeerId


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base class: `at` is when the event happened by this node's wall clock (Unix seconds). Fields listed in
    `SECRETS` are shown only to the person who started the node, and are neither stored nor passed on."""

    SECRETS: ClassVar[tuple[str, ...]] = ()

    at: float


class NodeStarted(Event, frozen=True, kw_only=True):
    """This node listens and serves. A swarm with keys `is_private`. `moved` has (port wanted, port taken
    instead) for each port that another program held. `is_open`: it listens on all networks of this machine,
    whether or not anybody reaches it. `join_address` is what to type on another machine; if it is None,
    `join_hint` says why."""

    peer: PeerId
    name: str
    swarm: str
    is_private: bool = False
    addresses: tuple[str, ...]
    identity_is_new: bool
    data_dir: str
    port_wanted: int
    port: int
    moved: tuple[tuple[int, int], ...] = ()
    is_open: bool = False
    join_address: str | None = None
    join_hint: str = ""


class CapacityMeasured(Event, frozen=True, kw_only=True):
    """This machine's offer. `corrected` lists wrong declarations, `small` the resources that are too small
    for use."""

    device: str
    cores: int
    memory_free_bytes: int
    memory_total_bytes: int
    flops_per_second: float
    location: str
    corrected: tuple[str, ...] = ()
    small: tuple[str, ...] = ()


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """A member's statement about its own condition, in coarse steps. `stages` it holds, as (first digits of
    the run's id, stage number); the list is cut to what fits."""

    capabilities: tuple[str, ...] = ()
    load_percent: int = 0
    memory_available_bytes: int = 0
    slots_free: int = 0
    stages: tuple[tuple[str, int], ...] = ()


class FencesTried(Event, frozen=True, kw_only=True):
    """A process was tentatively fenced in, as a stage's process is. `unfenced` lists the restrictions that
    this system could not enforce, and why. If there are any, only this node's own runs get a stage here,
    unless unfenced stages are allowed (`is_allowed`)."""

    fences: tuple[str, ...]
    unfenced: tuple[str, ...]
    is_allowed: bool


class JoinTried(Event, frozen=True, kw_only=True):
    """One address was tried. `outcome` is ok, refused, timeout, wrong key, work, unknown, self, or same key
    (a different node with this node's identity). `found_by` is empty for an address that was given, "memory"
    for a peer met before, and "beacon" for a peer heard on the local network."""

    address: str
    outcome: str
    detail: str
    peer: PeerId | None = None
    seconds: float = 0.0
    found_by: str = ""


class ClockCompared(Event, frozen=True, kw_only=True):
    """This machine's clock is `seconds` ahead of the clocks of `peers` other nodes, or behind them if
    negative; their time is used. 0: the clocks agree again."""

    seconds: float
    peers: int


class DatagramsBlocked(Event, frozen=True, kw_only=True):
    """No datagram gets through to `peers`, which are some of the `of` other members, although streams do.
    Empty: datagrams get through again."""

    peers: tuple[PeerId, ...]
    of: int


class ReachabilityFound(Event, frozen=True, kw_only=True):
    """Other nodes tried to reach this node. `reachable` is yes, no, or unknown yet; `asked` of `of` nodes
    tried. `relays` are the relays that make it reachable."""

    reachable: bool | None
    asked: int
    of: int
    addresses: tuple[str, ...]
    relays: tuple[PeerId, ...] = ()
    nat: str = ""
    mapping: str = ""


class IdentityShared(Event, frozen=True, kw_only=True):
    """Another running node has this node's identity, probably from a copy of its data folder. `started` is
    when that node started, by its own clock. The younger of the two stops; `is_younger` says that this is the
    other one."""

    name: str
    addresses: tuple[str, ...]
    started: float
    is_younger: bool


class MemberJoined(Event, frozen=True, kw_only=True):
    """A member is alive, for the first time or again; `found_through` says how it was found."""

    peer: PeerId
    name: str
    addresses: tuple[str, ...]
    found_through: str
    capacity: CapacityMeasured | None = None
    standing: Standing | None = None


class MemberChanged(Event, frozen=True, kw_only=True):
    """A live member announced something new about itself."""

    peer: PeerId
    name: str
    addresses: tuple[str, ...]
    capacity: CapacityMeasured | None = None
    standing: Standing | None = None


class MemberDegraded(Event, frozen=True, kw_only=True):
    """A live member is not dead, but answers this node late, or this node reaches it only through others.
    `condition` is late, no path, or empty if the fault is over. `rate` is the share of the latest probes that
    the member answered in time, and `seconds` how long an answer took."""

    peer: PeerId
    condition: str
    rate: float = 1.0
    seconds: float = 0.0
    reason: str = ""


class MemberSuspected(Event, frozen=True, kw_only=True):
    """A member is suspected of being dead: it answered neither `by` nor this node. `reason` says why."""

    peer: PeerId
    by: PeerId
    reason: str = ""


class MemberRefuted(Event, frozen=True, kw_only=True):
    """A suspected member proved to be alive; `reason` says how."""

    peer: PeerId
    reason: str = ""


class MemberLost(Event, frozen=True, kw_only=True):
    """A member was declared dead."""

    peer: PeerId
    reason: str


class MemberLeft(Event, frozen=True, kw_only=True):
    """A member announced that it leaves."""

    peer: PeerId
    reason: str = "left"


class RunAccepted(Event, frozen=True, kw_only=True):
    """This node accepted a signed manifest."""

    run: str
    model: str
    data: str
    steps: int
    requester: PeerId
    metrics: tuple[str, ...] = ()


class RunPlanned(Event, frozen=True, kw_only=True):
    """A plan came into force. `stages` holds one tuple of peers (the replicas) per stage.

    `trainer` is the committer; `trainers` are all members that feed samples. `planner` is the first in line
    to propose the next plan. `witnesses` vote and keep checkpoints, and have no other part. If any one of
    `pauses_without` is missing, the others cannot decide how to go on, and wait for it. `restored_step` is
    the step of the checkpoint that the run went back to; None if nothing was lost. `standbys` are the
    replicas that hold their stage's newest state and compute nothing.
    """

    run: str
    plan: str
    height: int
    trainer: PeerId
    planner: PeerId
    layers: tuple[tuple[int, int], ...]
    stages: tuple[tuple[PeerId, ...], ...]
    trainers: tuple[PeerId, ...] = ()
    witnesses: tuple[PeerId, ...] = ()
    pauses_without: tuple[PeerId, ...] = ()
    restored_step: int | None = None
    standbys: tuple[PeerId, ...] = ()


class RunCovered(Event, frozen=True, kw_only=True):
    """How well a run's stages are covered, according to its committer. `covers` has for each stage the chance
    that its newest state survives the death of its holder. `unreliable` names members that were lost today.
    `reason` says why a stage without a standby has none although a machine is idle."""

    run: str
    covers: tuple[float, ...]
    unreliable: str = ""
    reason: str = ""


class RunChanged(Event, frozen=True, kw_only=True):
    """A run's state (`partition.run.states`) has changed, with the reason. `waits_for` are the machines whose
    return would end a pause. `is_note`: the state may be the same, and the event only reports the reason."""

    run: str
    state: str
    reason: str
    waits_for: tuple[PeerId, ...] = ()
    is_note: bool = False


class RunResumed(Event, frozen=True, kw_only=True):
    """The first step under a new plan has been opened.

    `replayed` micro-batches are computed again because the replica that had summed them is gone, and
    `lost_steps` steps because a checkpoint is older. `filled` replicas took their state from others. Nothing
    was computed for `seconds`: since the last commit of a step, or since the lost member was last heard, if
    that is later.
    """

    run: str
    height: int
    step: int
    replayed: int
    lost_steps: int
    filled: tuple[PeerId, ...]
    seconds: float


class OfferChanged(Event, frozen=True, kw_only=True):
    """Whether this machine serves others from now on, and the `reason` if it does not. `unread` are the
    owner's rules that the machine cannot measure, and which are therefore not applied. `sends_less` is the
    reason for sending less, or empty."""

    may_serve: bool
    reason: str
    unread: tuple[str, ...] = ()
    sends_less: str = ""


class RunRevised(Event, frozen=True, kw_only=True):
    """The requester's newest revision of an active run: its last step, learning rate (None: as first
    requested), priority, and whether it pauses. `number` grows with each revision."""

    run: str
    number: int
    steps: int
    learning_rate: float | None
    priority: int
    is_paused: bool


class StageLeased(Event, frozen=True, kw_only=True):
    """This node gave a slot to a stage of a run."""

    run: str
    stage: int
    layers: tuple[int, int]


class ReplicaDropped(Event, frozen=True, kw_only=True):
    """A stage replica died during a step; its micro-batches are replayed on the other replicas of its
    stage."""

    run: str
    step: int
    stage: int
    peer: PeerId
    microbatches_replayed: int


class StageDegraded(Event, frozen=True, kw_only=True):
    """A replica of a stage computes at `rate` times its promised speed, as measured in its steps. If `reason`
    is empty, it is as fast as promised again."""

    run: str
    stage: int
    peer: PeerId
    rate: float
    reason: str


class StepCommitted(Event, frozen=True, kw_only=True):
    """A step is final. `loss` is the mean over all samples (or tokens, or labels) that it counts. `height` is
    that of the plan under which it was committed; the figures do not include replicas that finished the step
    under a different plan.

    Per stage, `utilisation` is the share of the step in which its replicas computed, `sent_bytes` what they
    sent towards the last stage, and `returned_bytes` what they sent towards the first. `bubble` is the share
    of all replicas' time in which they did not compute. `replayed` frames were sent a second time. `rounding`
    is the relative error that codecs added to activations and to gradients. `diverged` is the reason if the
    step changed nothing, or else empty; in that case `loss`, `samples` and `counted` are 0. `counted` is the
    divisor of the loss: the number of samples, or of tokens or labels if the model counts those.
    """

    run: str
    step: int
    loss: float
    samples: int
    seconds: float
    replicas: int
    utilisation: tuple[float, ...] = ()
    bubble: float = 0.0
    sent_bytes: tuple[int, ...] = ()
    returned_bytes: tuple[int, ...] = ()
    replayed: int = 0
    rounding: tuple[float, ...] = ()
    height: int = 0
    diverged: str = ""
    counted: int = 0


class CheckpointKept(Event, frozen=True, kw_only=True):
    """The state of a run after `step` steps, with every stage, is on the disks of `copies` members.

    The next checkpoint follows after `next_steps` steps, or about `next_seconds`. If a stage loses its last
    replica, at most this much is computed again. 0 if not known.
    """

    run: str
    step: int
    checkpoint: str
    copies: int
    size_bytes: int
    next_steps: int = 0
    next_seconds: float = 0.0


class CheckpointFailed(Event, frozen=True, kw_only=True):
    """This node could not keep its part of a run's state after `step` steps; the previous checkpoint stays
    the newest."""

    run: str
    step: int
    reason: str


class RunEvaluated(Event, frozen=True, kw_only=True):
    """The committed parameters were evaluated on held-out samples: the mean `loss`, and `metrics` summed over
    them.

    `accuracy` is the share of right answers, if the model counts them. `samples` is the divisor of the loss,
    which exceeds the number of samples if the model counts tokens. `step` is set between two steps of a run
    in exact mode, on its validation samples: the parameters are those after `step` steps. In that case the
    best so far were those after `best_step` steps, with the value `best`, and `since` evaluations have
    followed. `step` is None for the evaluation at a run's end, and in local mode.
    """

    run: str
    accuracy: float | None
    loss: float
    samples: int
    metrics: tuple[float, ...] = ()
    step: int | None = None
    best_step: int = 0
    best: float = 0.0
    since: int = 0


class RunEnded(Event, frozen=True, kw_only=True):
    """A run has ended. `outcome` is done, failed or stopped. `weights` is the BLAKE3 hash (hex) of the
    safetensors file, which is on this node's disk if `is_here`."""

    run: str
    outcome: str
    detail: str
    weights: str = ""
    is_here: bool = False


class RunReleased(Event, frozen=True, kw_only=True):
    """A proposed plan gave this node a part in a run, but was not decided, so this node has no part in the
    run."""

    run: str


class StrangerRefused(Event, frozen=True, kw_only=True):
    """The number of refusals for one reason passed a threshold; below it they are only counted."""

    reason: str
    count: int


class PageOpened(Event, frozen=True, kw_only=True):
    """The page is at `address`. If its port differs from `port_wanted`, another program holds that port.
    `link` has the page's token: it is only for the owner's screen, and is neither stored nor passed on.
    Clients find models at `models`."""

    SECRETS: ClassVar[tuple[str, ...]] = ("link",)

    address: str
    port_wanted: int
    link: str = ""
    models: str = ""


class AlertRaised(Event, frozen=True, kw_only=True):
    """Something is wrong (`node.alerts.rules.KINDS`). `about` is a run's id or empty; `level` is warn or
    bad."""

    alert: str
    about: str
    level: str
    text: str


class AlertCleared(Event, frozen=True, kw_only=True):
    """The problem of an alert is over."""

    alert: str
    about: str


class RecordShort(Event, frozen=True, kw_only=True):
    """Fewer nodes keep a record of this node than others may rely on."""

    purpose: str
    holders: int
    wanted: int


class TableMeasured(Event, frozen=True, kw_only=True):
    """This node's part of the DHT has changed: the number of contacts, of records held, of its own among
    them, the estimated number of nodes, and how often too few nodes kept a record of its own."""

    contacts: int
    records: int
    own_records: int
    nodes_estimated: int
    records_short: int
    is_client: bool

    @property
    def document(self) -> dict[str, int]:
        """Return all fields except `at`, as `status --json` shows them."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if name != "at"}


class NodeStopped(Event, frozen=True, kw_only=True):
    """This node has left the swarm."""
