"""Every bounded table makes room: early silent peers hold no place for ever.

A table that refuses the newest entry when full is listed here with the mechanism that makes room. If only the
holders themselves can make room, the table needs a register (`crypto.registers`) or a crowd
(`crypto.crowds`).
"""

import ast

from node.transport.punch_messages import PROTOCOL as PUNCH_PROTOCOL
from tests.hostile.wire import PROTOCOLS
from tests.source import sources
from tests.stack import simulate, swarm

OWN = "this node's own, or its owner's: no other peer fills it"
FLOW = "a queue that is emptied as fast as the loop goes; a datagram may be lost"
ROOM_MADE = {
    ("crypto/registers.py", "KNOWN_MAX"): "the greediest source's oldest",
    ("crypto/sessions/memories.py", "_memories_max"): "the greediest source's oldest",
    ("crypto/sessions/table.py", "strangers_max"): "the greediest source's oldest",
    ("crypto/sessions/table.py", "wanted_max"): "the oldest",
    ("dht/hunt.py", "HUNTS_MAX"): OWN,
    ("dht/contacts.py", "checks_max"): "a check ends with an answer or its timeout, in a second",
    ("dht/lookup.py", "found_max"): "a lookup ends in seconds",
    ("gossip/averaging/proof_table.py", "_kept_max"): "the author that matters least, then the oldest",
    ("gossip/broadcasts.py", "TOPICS_MAX"): OWN,
    ("crypto/registers.py", "places_max"): "the register itself",
    ("gossip/hints.py", "DOUBTED_MAX"): "one takes its turn in every third probe of the round",
    ("gossip/hints.py", "HINT_FACTS_MAX"): "facts about one member, which end with the hint",
    ("gossip/hints.py", "HINTS_MAX"): "hints expire, and each source has a credit of them",
    ("gossip/matchmaking.py", "READY_MAX"): "a wish is over within its patience; a gate says who counts",
    ("gossip/matchmaking.py", "WISHES_MAX"): OWN,
    ("gossip/pieces/uploads.py", "UPLOADS_MAX"): "one peer's own; what it takes makes room",
    ("gossip/state_table.py", "members_max"): "the dead, then those that answer nothing",
    ("gossip/probes.py", "RELAYS_MAX"): "a relay ends with its probe, within a second",
    ("gossip/push_pull.py", "ASKED_MAX"): "emptied at each interval",
    ("gossip/push_pull.py", "SERVED_MAX"): "emptied at each interval",
    ("gossip/roster.py", "CANDIDATES_MAX"): "a silent candidate is forgotten after three greetings",
    ("gossip/rosters.py", "RUNS_MAX"): OWN,
    ("gossip/roster.py", "_participants_max"): "the farthest by hash; who is silent for eight intervals",
    ("node/averaging/early_streams.py", "STREAMS_MAX"): "the stream of lowest rank; each waits some seconds",
    ("node/checkpoints/replication.py", "KEEPS_MAX"): "members of runs alone; each ends when its stage came",
    ("node/content/masks.py", "STOPS_KEPT_MAX"): "the oldest that no answer follows",
    ("node/content/blobs.py", "IN_FLIGHT_MAX"): OWN,
    ("node/content/data_cache.py", "SETS_MAX"): "the one unused for longest",
    ("node/content/exchange.py", "QUEUE_MAX"): "one peer's own; with more it counts as lost",
    ("node/content/graphs.py", "FETCHES_MAX"): "a fetch ends with its holders' answers",
    ("node/control.py", "WAITING_MAX"): "the oldest",
    ("node/pipeline/committer.py", "VOUCHES_MAX"): "members of a run alone; each step empties it",
    ("node/placement/turns.py", "REQUESTERS_MAX"): "the account with least in it",
    ("node/placement/turns.py", "GROUPS_MAX"): "the network with least in it",
    ("node/placement/turns.py", "WAITING_MAX"): "`node.runs.queue` keeps a register of those that wait",
    ("node/runs/chain.py", "SEGMENTS_MAX"): "members of a run alone; each plan agreed on empties it",
    ("node/runs/server.py", "RUNS_MAX"): "each holds a slot of this node or a plan names it; both lapse",
    ("node/runs/traces.py", "SPANS_ANSWERED_MAX"): "the length of one answer",
    ("node/state.py", "RESULTS_SHOWN_MAX"): OWN,
    ("node/content/masks.py", "RULES_MAX"): OWN,
    ("node/serving/texts.py", "READERS_MAX"): OWN,
    ("node/services/autonat.py", "SERVED_KEPT_MAX"): "kept for seconds, few of them for one host",
    ("node/services/bootstrap.py", "HEARD_MAX"): "emptied as they are tried",
    ("node/services/discovery.py", "SOUGHT_MAX"): OWN,
    (
        "node/services/relays/ledger.py",
        "circuits_max",
    ): "a silent one ends in a minute; a network has a quarter",
    ("node/services/relays/ledger.py", "PLACES_MAX"): "a place lapses in minutes; a network has few of them",
    ("node/transport/introductions.py", "COMING_MAX"): "the oldest of the sender that tells of most",
    ("node/transport/paths.py", "SEEKING_MAX"): "each attempt is over in seconds",
    ("node/transport/paths.py", "SOUGHT_MAX"): "the oldest whose attempt is over",
    ("node/transport/multiplexer.py", "CONTROL_MAX"): "one peer's own; with more its path ends",
    ("node/transport/address_book.py", "PEERS_MAX"): "the greediest source's oldest",
    ("node/transport/inbox.py", "_messages_max"): FLOW,
    ("node/transport/multicast.py", "PACKETS_MAX"): FLOW,
    ("node/optimizer/differences.py", "ALTERNATIVES_MAX"): OWN,
    ("node/web/door.py", "doorway_max"): "of those that have shown nothing, the one silent for longest",
    ("node/web/keys.py", "KEYS_MAX"): OWN,
    ("node/web/model_metrics.py", "MODELS_MAX"): "other models are counted together",
    ("node/web/quotas.py", "waiting_max"): "one key's own; its requests end when their clients hang up",
    ("partition/capture/lazy_tensor.py", "_TILES_MAX"): OWN,
    ("partition/execute/open_step.py", "IN_FLIGHT_MAX"): "one head's own; its next step empties it",
    ("partition/execute/open_step.py", "MICROBATCHES_MAX"): "one head's own; its next step empties it",
    ("partition/execute/sessions.py", "SESSIONS_MAX"): "the one unused for longest",
    ("partition/plan/tables.py", "_CACHED_MAX"): OWN,
    ("partition/run/admission.py", "ADMITTED_MAX"): "members with a chain of tickets alone",
    ("partition/run/admission.py", "chain_max"): "the length of one message",
    ("partition/run/admission.py", "USED_MAX"): "tickets expire in minutes; each was issued by a member",
    ("partition/run/sight.py", "KNOWN_MAX"): "members of a run alone",
    ("partition/run/branches.py", "TOLD_MAX"): "members of a run alone",
    ("partition/run/endings.py", "RUNS_MAX"): "the oldest that is over",
    ("partition/run/failures.py", "PEERS_MAX"): "this node's own count of failures",
    ("partition/run/receipts.py", "LEARNED_MAX"): "the oldest",
    ("partition/run/stall.py", "ROSTER_MAX"): "members of a run alone",
    ("partition/run/stored_chain.py", "CALLS_MAX"): FLOW,
    ("partition/serve/generation.py", "UNITS_IN_FLIGHT_MAX"): OWN,
    ("partition/serve/provider.py", "WAITING_UNITS_MAX"): "one session's own, which ends with one more",
    ("partition/execute/pages.py", "SERVED_SESSIONS_MAX"): "the node ends sessions: it admits far fewer",
    (
        "partition/serve/session_places.py",
        "SESSIONS_MAX",
    ): "the session that rests and is used least; else the register",
    ("partition/serve/upkeep.py", "MEMBERS_MAX"): "those only named by others; members are introduced",
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
    """Whether this is the length of an attribute."""
    is_length = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len"
    return is_length and isinstance(node.args[0], ast.Attribute)  # type: ignore[attr-defined]  # a call has


def test_every_full_table_has_a_known_way_to_make_room() -> None:
    found = full_tables()
    assert sorted(found - ROOM_MADE.keys()) == [], (
        "name the mechanism that makes room, or use crypto.registers"
    )
    assert sorted(ROOM_MADE.keys() - found) == [], "gone: remove it from the list"


def test_every_protocol_of_streams_is_in_the_register() -> None:
    async def main() -> None:
        async with swarm("a") as group:
            handlers = group.nodes["a"].network._handlers  # type: ignore[attr-defined]  # of the simulated one
            # Punching is for real sockets: a simulated network has no handler for it.
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
