"""Every bounded table makes room: peers that came early and stay silent hold no place forever.

A table that refuses the newest entry when it is full is listed here with the mechanism that makes room. If
only the holders themselves can make room, the table needs a register (`crypto.registers`) or a crowd
(`crypto.crowds`).
"""

import ast

from node.transport.punch_messages import PROTOCOL as PUNCH_PROTOCOL
from tests.hostile.wire import PROTOCOLS
from tests.source import sources
from tests.stack import simulate, swarm

OWN = "only this node or its owner adds entries; no other peer fills it"
FLOW = "a queue that is emptied as fast as the loop runs; a datagram may be lost"
ROOM_MADE = {
    ("crypto/registers.py", "KNOWN_MAX"): "the oldest of the greediest source is evicted",
    ("crypto/sessions/memories.py", "_memories_max"): "the oldest of the greediest source is evicted",
    ("crypto/sessions/table.py", "strangers_max"): "the oldest of the greediest source is evicted",
    ("crypto/sessions/table.py", "wanted_max"): "the oldest",
    ("dht/hunt.py", "HUNTS_MAX"): OWN,
    ("dht/contacts.py", "checks_max"): "a check ends with an answer or its timeout, in a second",
    ("dht/lookup.py", "found_max"): "a lookup ends in seconds",
    ("gossip/averaging/proof_table.py", "_kept_max"): "the table ends with its lookup, in seconds",
    ("gossip/broadcasts.py", "TOPICS_MAX"): OWN,
    ("crypto/registers.py", "places_max"): "the register itself",
    ("gossip/hints.py", "DOUBTED_MAX"): "one entry is checked and leaves in every third probe of the round",
    ("gossip/hints.py", "HINT_FACTS_MAX"): "the facts are about one member, and end with the hint",
    ("gossip/hints.py", "HINTS_MAX"): "hints expire, and each source has a limited credit of them",
    ("gossip/matchmaking.py", "READY_MAX"): "a wish ends within its patience; a gate decides who counts",
    ("gossip/matchmaking.py", "WISHES_MAX"): OWN,
    ("gossip/pieces/uploads.py", "UPLOADS_MAX"): (
        "the table is of one peer, and what that peer takes makes room"
    ),
    ("gossip/state_table.py", "members_max"): "the dead are evicted, then members that answer nothing",
    ("gossip/probes.py", "RELAYS_MAX"): "a relayed ping ends with its probe, within a second",
    ("gossip/push_pull.py", "ASKED_MAX"): "emptied at each interval",
    ("gossip/push_pull.py", "SERVED_MAX"): "emptied at each interval",
    ("gossip/roster.py", "CANDIDATES_MAX"): "a silent candidate is forgotten after three greetings",
    ("gossip/rosters.py", "RUNS_MAX"): OWN,
    ("gossip/roster.py", "_participants_max"): (
        "the farthest by hash is evicted, and all that are silent for eight intervals"
    ),
    ("node/averaging/early_streams.py", "STREAMS_MAX"): (
        "the stream of lowest rank is evicted; each waits some seconds"
    ),
    ("node/checkpoints/replication.py", "KEEPS_MAX"): (
        "only members of runs add entries; each ends when its stage has arrived"
    ),
    ("node/content/masks.py", "STOPS_KEPT_MAX"): "the oldest that no answer continues is evicted",
    ("node/content/blobs.py", "IN_FLIGHT_MAX"): OWN,
    ("node/content/data_cache.py", "SETS_MAX"): "the one unused for longest is evicted",
    ("node/content/exchange.py", "QUEUE_MAX"): (
        "the queue is of one peer, which counts as lost if it sends more"
    ),
    ("node/content/graphs.py", "FETCHES_MAX"): "a fetch ends with its holders' answers",
    ("node/control.py", "WAITING_MAX"): "the oldest",
    ("node/pipeline/committer.py", "VOUCHES_MAX"): (
        "only members of a run add entries, and each step empties it"
    ),
    ("node/placement/turns.py", "REQUESTERS_MAX"): "the account with the smallest balance is evicted",
    ("node/placement/turns.py", "GROUPS_MAX"): "the network with the smallest balance is evicted",
    ("node/placement/turns.py", "WAITING_MAX"): "`node.runs.queue` keeps a register of waiting runs",
    ("node/runs/chain.py", "SEGMENTS_MAX"): (
        "only members of a run add entries, and each decided plan empties it"
    ),
    ("node/runs/server.py", "RUNS_MAX"): "each holds a slot of this node, or a plan names it; both expire",
    ("node/runs/traces.py", "SPANS_ANSWERED_MAX"): "it limits the length of one answer",
    ("node/state.py", "RESULTS_SHOWN_MAX"): OWN,
    ("node/content/masks.py", "RULES_MAX"): OWN,
    ("node/serving/texts.py", "READERS_MAX"): OWN,
    ("node/services/autonat.py", "SERVED_KEPT_MAX"): (
        "an entry is kept for seconds, and one host has few of them"
    ),
    ("node/services/bootstrap.py", "HEARD_MAX"): "it is emptied as addresses are tried",
    ("node/services/discovery.py", "SOUGHT_MAX"): OWN,
    (
        "node/services/relays/ledger.py",
        "circuits_max",
    ): "a silent circuit ends in a minute, and a network has at most a quarter",
    ("node/services/relays/ledger.py", "PLACES_MAX"): (
        "a place expires in minutes, and a network has few of them"
    ),
    ("node/transport/introductions.py", "COMING_MAX"): (
        "the oldest of the sender that announces most is evicted"
    ),
    ("node/transport/paths.py", "SEEKING_MAX"): "each attempt is over in seconds",
    ("node/transport/paths.py", "SOUGHT_MAX"): "the oldest whose attempt is over is evicted",
    ("node/transport/multiplexer.py", "CONTROL_MAX"): (
        "the queue is of one peer, whose path ends if it needs more"
    ),
    ("node/transport/address_book.py", "PEERS_MAX"): "the oldest of the greediest source is evicted",
    ("node/transport/inbox.py", "_messages_max"): FLOW,
    ("node/transport/multicast.py", "PACKETS_MAX"): FLOW,
    ("node/optimizer/differences.py", "ALTERNATIVES_MAX"): OWN,
    ("node/web/door.py", "doorway_max"): (
        "of the visitors that have shown nothing, the one silent for longest is evicted"
    ),
    ("node/web/keys.py", "KEYS_MAX"): OWN,
    ("node/web/model_metrics.py", "MODELS_MAX"): "further models are counted together",
    ("node/web/quotas.py", "waiting_max"): (
        "the table is of one key, and its requests end when their clients disconnect"
    ),
    ("partition/capture/lazy_tensor.py", "_TILES_MAX"): OWN,
    ("partition/execute/open_step.py", "IN_FLIGHT_MAX"): (
        "the table is of one head, and its next step empties it"
    ),
    ("partition/execute/open_step.py", "MICROBATCHES_MAX"): (
        "the table is of one head, and its next step empties it"
    ),
    ("partition/execute/sessions.py", "SESSIONS_MAX"): "the one unused for longest is evicted",
    ("partition/plan/tables.py", "_CACHED_MAX"): OWN,
    ("partition/run/admission.py", "ADMITTED_MAX"): "only members with a chain of tickets add entries",
    ("partition/run/admission.py", "chain_max"): "it limits the length of one message",
    ("partition/run/admission.py", "USED_MAX"): "tickets expire in minutes, and each was issued by a member",
    ("partition/run/sight.py", "KNOWN_MAX"): "only members of a run add entries",
    ("partition/run/branches.py", "TOLD_MAX"): "only members of a run add entries",
    ("partition/run/endings.py", "RUNS_MAX"): "the oldest run that is over is evicted",
    ("partition/run/failures.py", "PEERS_MAX"): "it contains this node's own count of failures",
    ("partition/run/receipts.py", "LEARNED_MAX"): "the oldest",
    ("partition/run/stall.py", "ROSTER_MAX"): "only members of a run add entries",
    ("partition/run/stored_chain.py", "CALLS_MAX"): FLOW,
    ("partition/serve/generation.py", "UNITS_IN_FLIGHT_MAX"): OWN,
    ("partition/serve/provider.py", "WAITING_UNITS_MAX"): (
        "the table is of one session, which ends if it needs more"
    ),
    ("partition/execute/pages.py", "SERVED_SESSIONS_MAX"): (
        "the node ends sessions, because it admits far fewer"
    ),
    (
        "partition/serve/session_places.py",
        "SESSIONS_MAX",
    ): "the least used resting session is evicted; otherwise the register decides",
    ("partition/serve/upkeep.py", "MEMBERS_MAX"): (
        "peers that are only named by others are evicted; members are introduced"
    ),
    ("partition/steps/schedule.py", "in_flight_max"): OWN,
}


def full_tables() -> set[tuple[str, str]]:
    """Return (file, limit) of every check that a table of an object is full before it grows."""
    found = set()
    for source in sources("crypto", "dht", "gossip", "partition", "node"):
        for node in source.each(ast.Compare):
            is_before = isinstance(node.ops[0], ast.GtE | ast.Lt)
            limit = node.comparators[0]
            name = limit.id if isinstance(limit, ast.Name) else getattr(limit, "attr", "")
            if len(node.ops) == 1 and is_before and name.lower().endswith("max") and is_own_table(node.left):
                found.add((source.place, name))
    return found


def is_own_table(node: ast.expr) -> bool:
    """Return whether this is the length of an attribute."""
    is_length = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len"
    return is_length and isinstance(node.args[0], ast.Attribute)  # type: ignore[attr-defined]  # a call has


def test_every_full_table_has_a_known_way_to_make_room() -> None:
    found = full_tables()
    assert sorted(found - ROOM_MADE.keys()) == [], (
        "name the mechanism that makes room, or use crypto.registers"
    )
    assert sorted(ROOM_MADE.keys() - found) == [], "no longer in the program: remove it from the list"


def test_every_protocol_of_streams_is_in_the_register() -> None:
    async def main() -> None:
        async with swarm("a") as group:
            handlers = group.nodes["a"].network._handlers  # type: ignore[attr-defined]  # of the simulated one
            # Punching needs real sockets, so a simulated network has no handler for it.
            streamed = {each.name for each in PROTOCOLS if each.said is not None} - {PUNCH_PROTOCOL}
            assert streamed <= set(handlers.register.scopes) == handlers.limits.keys()

    simulate(main)


def test_only_the_register_serves_streams() -> None:
    doors = {
        source.place
        for source in sources("node", "sim")
        for call in source.each(ast.Call)
        if isinstance(call.func, ast.Name) and call.func.id == "serve"
    }
    assert doors == {"node/transport/router.py", "sim/peer_network.py"}
