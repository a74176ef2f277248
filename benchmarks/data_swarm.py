"""Distributes 200 MB from one requester to eight providers with 20 Mbit/s each way, over the simulator's
network.

The exchange core is the real one; time is virtual, so the figures do not depend on the machine. The reference
is the time that the requester alone would take to serve all of them at its full rate. Cases: undisturbed; the
requester killed after it has uploaded 1.1 copies; a liar and a peer that never sends among the holders.
"""

from math import inf

from _figures import Goal, arguments, leave, report

from tests.gossip.trading import Trade, trade

PIECES_FULL = 763
"""The number of pieces of 200 MB."""
PIECES_QUICK = 128
PEERS = 8
MBIT = 20.0
SEEDS_FULL, SEEDS_QUICK = (1, 2, 3), (1,)
RATIO_GOAL = 0.25


def row(what: str, seed: int, found: Trade) -> dict[str, object]:
    return {
        "case": what,
        "seed": seed,
        "finished": found.finished,
        "seconds": round(found.seconds, 1),
        "alone_seconds": round(found.seconds_of_source_alone, 1),
        "ratio": round(found.seconds / found.seconds_of_source_alone, 3),
        "copies_of_source": round(found.copies_of_source, 2),
        "wasted_share": round(found.wasted_share, 3),
    }


def main() -> int:
    """Play all cases; return 1 if a goal is missed."""
    flags = arguments(str(__doc__))
    pieces = PIECES_QUICK if flags.quick else PIECES_FULL
    rows, goals = [], []
    for what, copies, liars, mutes in (
        ("calm", inf, 0, 0),
        ("killed at 1.1 copies", 1.1, 0, 0),
        ("liars", inf, 1, 1),
    ):
        for seed in SEEDS_QUICK if flags.quick else SEEDS_FULL:
            found = trade(
                peers=PEERS + liars + mutes,
                pieces=pieces,
                mbit_per_second=MBIT,
                seed=seed,
                kill_after_copies=copies,
                liars=liars,
                mutes=mutes,
            )
            rows.append(row(what, seed, found))
            goals.append(
                Goal(f"{what}, seed {seed}: providers with a full copy", found.finished, ">=", PEERS)
            )
            if not liars:
                ratio = found.seconds / found.seconds_of_source_alone
                goals.append(
                    Goal(
                        f"{what}, seed {seed}: time relative to the requester alone", ratio, "<=", RATIO_GOAL
                    )
                )
    return report("data_swarm", rows, goals, as_json=flags.json)


if __name__ == "__main__":
    leave(main())
