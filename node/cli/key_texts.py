"""The meaning of each key of node.toml and RUN.toml, in one line, for the files that `peerloom init` writes
and for docs/reference. Tests check that every key in the settings has a text here, and every text a key.
"""

from collections.abc import Mapping

NODE_KEYS: Mapping[str, tuple[str, str]] = {
    "name": ('"lab-1"', "this node's name on screens; default: the machine's name"),
    "data_dir": ('"/srv/peerloom"', "the folder of keys, checkpoints and results"),
    "observer": ("false", "only watch: take no stages of anybody"),
    "join.seeds": (
        "[]",
        'peers to join through, any of a swarm: "10.0.0.5:9747", or a multiaddress with a peer id',
    ),
    "join.seed_files": ("[]", "files with such addresses, one per line; # starts a comment"),
    "join.remember": ("true", "also try peers that this node has met before"),
    "join.lan": ("true", "find nodes on the local network by beacons, and let them find this one"),
    "listen.addresses": (
        '["/ip4/0.0.0.0/tcp/9747", "/ip6/::/tcp/9747"]',
        "listen at exactly these, or fail; `--port N` instead uses the first free one of eleven ports",
    ),
    "listen.announce": ("[]", "addresses announced to others instead of those of this machine's interfaces"),
    "listen.map": ("true", "ask the router for a port, by PCP, NAT-PMP or UPnP"),
    "swarm.name": ('"default"', "name of the swarm; nodes with different names do not connect"),
    "swarm.preset": (
        '"lan"',
        "timers for this kind of network: lan, wan, host (one machine), local (one that never stalls)",
    ),
    "swarm.scope": (
        '"all"',
        "which members a member lists: all (at most 2,000) or neighbourhood; the same for the whole swarm",
    ),
    "swarm.key_file": (
        '""',
        "a file with 64 hex digits per line that makes the swarm private; the first line is used",
    ),
    "swarm.work_bits": ("0", "proof of work in every node's id; the same for the whole swarm"),
    "relay.enabled": (
        "true",
        "relay traffic for peers that cannot be dialled, if others can reach this node",
    ),
    "relay.upload": ('"10Mbit/s"', 'limit for all circuits together; "any": no limit'),
    "relay.circuits": ("64", "maximum number of circuits at a time"),
    "resources.device": ('"auto"', "device for computing: auto, cpu, mps, cuda:0"),
    "resources.memory": ('"80%"', "how much memory to offer: 12GB, or a share such as 80%"),
    "resources.scratch": (
        '"16GiB"',
        "disk space for frames of open steps and files of all stages together, or a share",
    ),
    "resources.cores": ("0", "how many cores to offer; 0: all"),
    "resources.location": ('""', "location of the machine, such as eu-west; plans may ask for it"),
    "resources.accept_runs": (
        '"swarm"',
        "whose stages to accept: swarm, listed ([offer] peers), invited ([offer] runs), never",
    ),
    "resources.disk": (
        '"16GiB"',
        "disk space for others' shards, checkpoints and results; the oldest are evicted",
    ),
    "resources.allow_unfenced": ("false", "accept stages of others even if the system cannot fence them in"),
    "resources.calibrate": (
        "true",
        "measure how long operators take here, once per machine, while it is idle",
    ),
    "resources.spare_process": ("true", "keep a process loaded for the next stage: 0.2 GB of memory"),
    "follow.key": ('""', "id of the key whose signed settings to follow, as `peerloom id` prints it"),
    "follow.allow": (
        '["all"]',
        "settings that this key may change, such as hours and upload; all: limits, hours and offers",
    ),
    "offer.slots": ("1", "maximum number of stages, each with its share of cores and memory"),
    "offer.hours": ('"always"', "when to serve others: always, or 22:00-07:00,12:00-13:00"),
    "offer.idle": ('"0s"', "only after keyboard and mouse were unused for this long, such as 10m"),
    "offer.load": ('"0%"', "only while other programs use at most this share of all cores; 0%: no limit"),
    "offer.upload": (
        '"any"',
        "rate limit of bulk sending, all streams together, such as 10Mbit/s; control traffic does not wait",
    ),
    "offer.download": ('"any"', "rate limit of bulk receiving"),
    "offer.mains_only": ("false", "not on battery"),
    "offer.battery_min": ('"0%"', "on battery with less charge than this, apply battery_low"),
    "offer.battery_low": (
        '"never"',
        "on low battery: never: serve no others; less: send less, and be asked for less",
    ),
    "offer.metered": (
        '"no"',
        "if you pay this link by the byte: less or never, as in battery_low; else no",
    ),
    "offer.peers": ("[]", "ids of the peers that accept_runs = listed serves"),
    "offer.runs": ("[]", "ids of the runs that accept_runs = invited serves"),
    "offer.own_data": (
        "[]",
        "NAME=PATH: federated runs that ask for NAME may train on it here, but never see it",
    ),
    "offer.peer_sessions": (
        "16",
        "maximum number of sessions that one peer may have with the services held here",
    ),
    "offer.peer_tokens": ("0", "maximum number of tokens computed for one peer per minute; 0: no limit"),
    "offer.peer_cache": (
        '"50%"',
        "maximum share of the memory for keys and values that one peer's sessions may take",
    ),
    "web.address": (
        '"127.0.0.1:9748"',
        "address of the web page and of the API for models, for this machine alone; off: none",
    ),
    "web.cert": (
        '""',
        "a PEM file with certificate and key: clients reach models over HTTPS, also from other machines",
    ),
    "web.proxy": ("false", "there is a reverse proxy with TLS in front of the address"),
    "log.format": ('"off"', "write each event as a line of events.log in the data folder: off, text, json"),
    "log.levels": ('"info"', "lowest level to write, by area: info, or swarm=warning,runs=info"),
    "alerts.webhook": ('""', "a URL to which JSON is POSTed when something needs attention"),
    "alerts.command": (
        '""',
        "a program to start for an alert; PEERLOOM_ALERT_KIND, _LEVEL, _TEXT, _IS_RAISED describe the alert",
    ),
}
"""For each key: the default as written in the file, and the meaning."""

RUN_KEYS: Mapping[str, str] = {
    "model": "simple-cnn, resnet18, gpt, vision, language; FILE.peerloom; FILE.py:FUNCTION; a model folder",
    "data": "digits, a table, arrays, pictures, a text, a folder, a URL, FILE.py:FUNCTION; or a table",
    "options": "arguments of the built-in model or of FUNCTION, such as layers, heads and width of gpt",
    "tokenizer": "a tokenizer.json that turns text into tokens; train.window then counts tokens",
    "train.steps": "how many steps",
    "train.epochs": "passes over the training samples, instead of steps",
    "train.batch": "samples per step over all members; in mode local, of each member",
    "train.microbatch": "samples in a frame between stages; auto: chosen when the run is placed",
    "train.window": "bytes (with a tokenizer: tokens) in a sample of text; 0: as many as the model takes",
    "train.optimizer": "sgd, adam or adamw",
    "train.learning_rate": "the highest learning rate of the schedule",
    "train.momentum": "of sgd",
    "train.weight_decay": "weight decay of parameters that are in no group",
    "train.schedule": "constant, linear or cosine; the last two fall to 0 at the last step",
    "train.warmup_steps": "number of first steps during which the learning rate rises",
    "train.clip_norm": "scale a step's gradient down to this norm; 0: never",
    "train.autocast": "off, or bfloat16 arithmetic for the operators that allow it",
    "train.recompute": "recompute activations in the backward pass instead of keeping them; or auto",
    "train.seed": "seed of initialisation, order of samples and dropout",
    "train.dtype": "float32 or float64",
    "train.frames": "precision of frames between stages: exact, bfloat16, int8, int4, auto",
    "train.on_divergence": "if a step's numbers are not finite: stop the run, or continue without that step",
    "train.groups": "[[train.groups]] tables: match = names of parameters, weight_decay, rate_factor",
    "train.mode": "exact: one step over all members; local: each trains the model and averages; auto",
    "train.federated": "in mode local: data stays with its owners, who each offer a data set with this name",
    "train.local_steps": "in mode local: steps between two rounds of averaging",
    "train.strategy": "algorithm of the rounds: average, gossip, diloco, noloco, sparseloco, asynchronous",
    "train.codec": "precision of averaging: float32, bfloat16, float16, int8, int4",
    "train.weighting": "a member's weight in a round: samples or equal",
    "train.aggregate": "the rule of a round: auto, mean, or a rule that tolerates some lying members",
    "train.damping": "share of a round's result that a member takes, from just above 0 to 1",
    "train.evaluate_every": "in mode local: rounds between two evaluations",
    "train.patience": (
        "end the run after this many evaluations (validations) without an improvement; 0: never"
    ),
    "train.improvement": "smallest change that counts as an improvement",
    "train.validate_every": (
        "in mode exact: steps between two validations; 0: about twenty validations in all"
    ),
    "train.watch": (
        "metric by which states are compared: loss, accuracy, another metric; -NAME: less is better"
    ),
    "train.keep": "the result: the last state, or the best validated state",
    "plan.stages": "number of stages into which the model is cut; 0: as many as pay off",
    "plan.replicas": "number of peers that hold each stage; 0: the planner decides",
    "plan.replicas_min": "minimum number of replicas if the planner decides",
    "plan.standbys": (
        "maximum number of idle machines that follow a stage's state and can take over immediately"
    ),
    "plan.objective": "goal of the planner: throughput, or energy (fewest joules per sample)",
    "plan.together": 'layers that stay in one stage: [["3-5"], ["embedding", "head"]]',
    "plan.keep_tied": "layers that share a weight stay in one stage",
    "plan.trainers": "members that feed samples; if several, they continue when the requester is gone",
    "plan.pipeline": "1f1b holds few micro-batches at a time, gpipe all of a step",
    "plan.checkpoint_every": (
        "steps between two checkpoints, and so the most steps that can be lost; 0: no checkpoints"
    ),
    "plan.on_lost_quorum": "without a majority: wait, fork (continue; the larger branch survives), requester",
    "plan.place": "only peers in this location hold stages",
    "plan.near": "only peers within max_rtt_milliseconds of this location or peer",
    "plan.max_rtt_milliseconds": (
        "limit for near, or for the distance to the requester; 0: 30 with near, else no limit"
    ),
    "plan.devices": 'kinds of devices, the preferred one first: cuda, mps, cpu; "common": the kinds nearby',
    "plan.gflops_min": (
        "only peers with at least this measured speed, in 10^9 operations per second of a slot"
    ),
    "plan.priority": "among your own runs, 0 to 9; higher ones go first if providers are busy",
    "plan.deadline_minutes": "alert you if the run cannot be done by then; 0: no deadline",
    "goal.samples_per_second": "alert you if the run is slower than this; 0: no goal",
    "goal.seconds": "how long the run must be slower before you are alerted",
    "splits.validation": "a source of validation samples, given like data",
    "splits.test": "a source of test samples",
    "splits.validation_share": "share of the training samples to hold out if there is no source",
    "splits.test_share": "share of the training samples to hold out if there is no source",
}

DATA_KEYS: Mapping[str, str] = {
    "source": 'what `data = "..."` names',
    "label": "the column of labels",
    "features": "the columns to learn from",
    "ignore": "the columns to leave out; []: none",
    "separator": "the character between columns",
    "decimal": "the decimal mark: . or ,",
    "encoding": "encoding of the text, such as latin-1",
    "header": "whether the first line holds names",
    "classes": "class names in the order of their numbers; or words, numbers, amounts",
    "channels": "position of the channels of images in arrays: first or last",
    "prompt": "column or columns of prompts, for a language model",
    "completion": "column of completions",
    "messages": "column of conversations",
    "text": "column of texts",
    "loss": "which tokens are learnt: answers, last, all",
    "form": "bytes: learn a text byte by byte; table: read it as a table",
}
