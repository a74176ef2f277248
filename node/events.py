"""The events of a node, frozen: screens, `--json`, metrics and the simulator's report are made of them
alone (ARCHITECTURE law 5).

Shells emit them; `node.state.apply` folds them. An event is past tense, carries `at` (unix seconds)
and plain values, and is never changed once it has happened. New kinds may be added; none is renamed.
`node.event_kinds` has all of them, those of the files beside this one too.
"""

from typing import ClassVar

import msgspec

from crypto.identity import PeerId


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base: when it happened, by this node's wall clock (unix seconds). Fields that are `SECRETS` are shown
    to the person who started the node, and neither kept nor passed on."""

    SECRETS: ClassVar[tuple[str, ...]] = ()

    at: float


class NodeStarted(Event, frozen=True, kw_only=True):
    """This node listens and serves. A swarm with keys `is_private`. `moved`: (port wanted, port taken
    instead) of each that others held. `is_open`: on all of this machine's networks, whoever reaches it.
    `join_address` is what to type on another machine; where there is none, `join_hint` says why."""

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
    """This machine's offer: `corrected` are wrong declarations, `small` the parts too little for use."""

    device: str
    cores: int
    memory_free_bytes: int
    memory_total_bytes: int
    flops_per_second: float
    location: str
    corrected: tuple[str, ...] = ()
    small: tuple[str, ...] = ()


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """How a member says it is, in steps. `stages` it holds: first digits of the run, number; what fits."""

    capabilities: tuple[str, ...] = ()
    load_percent: int = 0
    memory_available_bytes: int = 0
    slots_free: int = 0
    stages: tuple[tuple[str, int], ...] = ()


class FencesTried(Event, frozen=True, kw_only=True):
    """A process was fenced in as a stage's is. `unfenced` is what this system could not hold it to, and why:
    where there is any, only this node's own runs get a stage here, unless that `is_allowed`."""

    fences: tuple[str, ...]
    unfenced: tuple[str, ...]
    is_allowed: bool


class JoinTried(Event, frozen=True, kw_only=True):
    """One address was tried. `outcome`: ok, refused, timeout, wrong key, work, unknown, self, or same key, of
    another node with this one's identity. `found_by` is empty for an address that was given, "memory" for
    that of a peer met before, "beacon" for one heard on the local network."""

    address: str
    outcome: str
    detail: str
    peer: PeerId | None = None
    seconds: float = 0.0
    found_by: str = ""


class ClockCompared(Event, frozen=True, kw_only=True):
    """The clock of this machine is so many seconds ahead of the time that `peers` others show, or behind it
    where that is negative; theirs is used. 0: they agree again."""

    seconds: float
    peers: int


class DatagramsBlocked(Event, frozen=True, kw_only=True):
    """No datagram gets through to these of the `of` other members; streams do. Empty: all is well again."""

    peers: tuple[PeerId, ...]
    of: int


class ReachabilityFound(Event, frozen=True, kw_only=True):
    """Others tried to reach this node: yes, no, or unknown yet; `asked` of `of` did. Its `relays` help."""

    reachable: bool | None
    asked: int
    of: int
    addresses: tuple[str, ...]
    relays: tuple[PeerId, ...] = ()
    nat: str = ""
    mapping: str = ""


class IdentityShared(Event, frozen=True, kw_only=True):
    """Another node that lives now has this node's identity, as a copy of its data folder makes it. `started`
    is when it began by its own clock. The younger of both stops: the other one if it `is_younger`."""

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
    """A live member says something new of itself."""

    peer: PeerId
    name: str
    addresses: tuple[str, ...]
    capacity: CapacityMeasured | None = None
    standing: Standing | None = None


class MemberDegraded(Event, frozen=True, kw_only=True):
    """A live member answers this node late, or it has no path to it but through others, which is not dead.
    `condition`: late, no path, or empty where that is over. `rate` is the share of the latest probes that it
    answered in time, `seconds` what an answer took."""

    peer: PeerId
    condition: str
    rate: float = 1.0
    seconds: float = 0.0
    reason: str = ""


class MemberSuspected(Event, frozen=True, kw_only=True):
    """A member did not answer `by`, nor this node, for the `reason`."""

    peer: PeerId
    by: PeerId
    reason: str = ""


class MemberRefuted(Event, frozen=True, kw_only=True):
    """A suspected member proved to be alive, as the `reason` says."""

    peer: PeerId
    reason: str = ""


class MemberLost(Event, frozen=True, kw_only=True):
    """A member was declared dead."""

    peer: PeerId
    reason: str


class MemberLeft(Event, frozen=True, kw_only=True):
    """A member said goodbye."""

    peer: PeerId
    reason: str = "left"


class RunAccepted(Event, frozen=True, kw_only=True):
    """A signed manifest was taken in."""

    run: str
    model: str
    data: str
    steps: int
    requester: PeerId
    metrics: tuple[str, ...] = ()


class RunPlanned(Event, frozen=True, kw_only=True):
    """A plan came into force. `stages` holds one tuple of peers (the replicas) per stage.

    `trainer` is the one that commits, `trainers` are all that feed. `planner` is first in line to propose
    what follows. `witnesses` vote and keep checkpoints, and have no other part. Without any one of
    `pauses_without` the others cannot decide how to go on, and wait for it. `restored_step` is where a
    checkpoint took the run back to, None where nothing was lost. `standbys` are the replicas that hold the
    newest state of their stage and compute nothing.
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
    """How well a run's stages are covered, as its committer judges it: for each the chance that somebody has
    its newest state when its holder dies. `unreliable` names members that were lost today, `reason` says why
    a stage has no standby, where an idle machine cannot follow it."""

    run: str
    covers: tuple[float, ...]
    unreliable: str = ""
    reason: str = ""


class RunChanged(Event, frozen=True, kw_only=True):
    """A run is in another state (`partition.run.states`), and why. `waits_for` are the machines whose return
    would end a pause. `is_note`: the state may be as before, and the reason is what matters."""

    run: str
    state: str
    reason: str
    waits_for: tuple[PeerId, ...] = ()
    is_note: bool = False


class RunResumed(Event, frozen=True, kw_only=True):
    """The first step under a new plan is open.

    `replayed` micro-batches are computed again because whoever had summed them is gone, `lost_steps` steps
    because a checkpoint is older. `filled` replicas took their state from others. Nothing was computed for
    `seconds`: since the last step was committed, or since whoever was lost was last heard, if that is later.
    """

    run: str
    height: int
    step: int
    replayed: int
    lost_steps: int
    filled: tuple[PeerId, ...]
    seconds: float


class OfferChanged(Event, frozen=True, kw_only=True):
    """Whether this machine serves others from now on; `reason` is why not. `unread` are rules of its owner
    that the machine cannot measure, and which so are not kept. `sends_less` is why it does, or empty."""

    may_serve: bool
    reason: str
    unread: tuple[str, ...] = ()
    sends_less: str = ""


class RunRevised(Event, frozen=True, kw_only=True):
    """The requester's newest word on a run that goes on: its last step, learning rate (None: as it was asked
    for), priority, and whether it pauses. `number` grows with each."""

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
    """A stage replica died in a step; its micro-batches are replayed on the others of its stage."""

    run: str
    step: int
    stage: int
    peer: PeerId
    microbatches_replayed: int


class StageDegraded(Event, frozen=True, kw_only=True):
    """A replica of a stage computes at `rate` of what was promised of it, as its steps were measured; with an
    empty `reason` it is as promised again."""

    run: str
    stage: int
    peer: PeerId
    rate: float
    reason: str


class StepCommitted(Event, frozen=True, kw_only=True):
    """A step is final. `loss` is the mean over all that it counts, `height` that of the plan it was committed
    under; what it took is not known of replicas that ended it under another plan than that of who says so.

    For each stage: `utilisation` is the share of the step in which its replicas computed, `sent_bytes` what
    they sent towards the last stage and `returned_bytes` towards the first. `bubble` is the share of all
    replicas' time that was not computing. `replayed` frames went out a second time. `rounding` is the
    relative error that codecs added to activations and to gradients. `diverged` is why the step changed
    nothing, empty where it did: then `loss`, `samples` and `counted` are 0. `counted` is what the loss was
    divided by: the samples, or tokens or labels where the model counts those.
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
    """The state of a run after `step` steps is on the disks of `copies` members, every stage of it.

    The next one comes `next_steps` steps later, which take about `next_seconds`: so much is computed again at
    most where a stage loses its last replica. 0 where that is not known.
    """

    run: str
    step: int
    checkpoint: str
    copies: int
    size_bytes: int
    next_steps: int = 0
    next_seconds: float = 0.0


class CheckpointFailed(Event, frozen=True, kw_only=True):
    """This node could not keep its part of a run's state after `step` steps; the one before stays newest."""

    run: str
    step: int
    reason: str


class RunEvaluated(Event, frozen=True, kw_only=True):
    """The committed parameters on held-out samples: the mean `loss`, and `metrics` summed over them.

    `accuracy` is the share of right answers, where the model counts them. `samples` is what the loss was
    divided by, which is more than samples where it counts tokens. `step`: between two steps of a run in exact
    mode, the state after so many on its validation samples; of these that after `best_step` steps was the
    best, by the value `best`, and so many came `since`. None for what a run is judged by at its end, and in
    local mode.
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
    """`outcome`: done, failed or stopped. `weights` is the BLAKE3 hash (hex) of the safetensors file, which
    is on this node's disk if `is_here`."""

    run: str
    outcome: str
    detail: str
    weights: str = ""
    is_here: bool = False


class RunReleased(Event, frozen=True, kw_only=True):
    """This node was asked into a run by a plan that did not come about: it has no part in it."""

    run: str


class StrangerRefused(Event, frozen=True, kw_only=True):
    """Refusals by one reason passed a threshold; below it they are only counted."""

    reason: str
    count: int


class PageOpened(Event, frozen=True, kw_only=True):
    """The page is at `address`; others hold `port_wanted` where it is another. `link` has the page's token:
    it is for the screen of its owner, and neither kept nor passed on. Clients find models at `models`."""

    SECRETS: ClassVar[tuple[str, ...]] = ("link",)

    address: str
    port_wanted: int
    link: str = ""
    models: str = ""


class AlertRaised(Event, frozen=True, kw_only=True):
    """Something is wrong (`node.alerts.rules.KINDS`). `about` is a run's id or empty, `level` warn or bad."""

    alert: str
    about: str
    level: str
    text: str


class AlertCleared(Event, frozen=True, kw_only=True):
    """It is no longer so."""

    alert: str
    about: str


class RecordShort(Event, frozen=True, kw_only=True):
    """A record of this node is kept by fewer nodes than others may rely on."""

    purpose: str
    holders: int
    wanted: int


class TableMeasured(Event, frozen=True, kw_only=True):
    """This node's part of the DHT is another than it was: contacts, records held, of these its own, how many
    nodes there seem to be, and how often a record of its own was kept by too few."""

    contacts: int
    records: int
    own_records: int
    nodes_estimated: int
    records_short: int
    is_client: bool

    @property
    def document(self) -> dict[str, int]:
        """All but when, as `status --json` says it."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if name != "at"}


class NodeStopped(Event, frozen=True, kw_only=True):
    """This node said goodbye to the swarm."""
