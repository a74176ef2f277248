"""Four scripts that train one small GPT by `me.optimizer(..., target_batch_size=256)`, compared with rivals.

A GPT of 0.83 million parameters reads the repository's own documents, in batches of 16, with one thread per
process. `ours` are four nodes. `silent` are four scripts without peers, each with its own model. `hivemind`
are four of its optimizers, if PEERLOOM_HIVEMIND names the folders with it and its numpy (see
`dht_sockets.py`). The kinds take turns in one run, each with the same initial values and for the same time,
so that a busy machine slows all equally. Samples per second are the sum over all four; the loss is on
held-out text, the median of the four. `blocked` is the share of the time in which `step` worked or waited for
the run.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from _figures import Goal, arguments, leave, report

COUNT = 4
SECONDS, TURNS, SECONDS_QUICK = 25.0, 3, 6.0
ANSWER_SECONDS = 120.0
"""Time limit for an answer: at first four processes load torch."""
HIVEMIND = os.environ.get("PEERLOOM_HIVEMIND", "")
RIVAL_GOAL, SILENT_GOAL, BLOCKED_GOAL = 2.0, 0.7, 15.0
PEER = Path(__file__).with_name("_gpt_peer.py")


class Script:
    """One process, which accepts JSON commands."""

    def __init__(self, kind: str, number: int, folder: str) -> None:
        self.kind = kind
        environment = dict(os.environ)
        if kind == "hivemind":
            environment["PYTHONPATH"] = HIVEMIND
        self.process = subprocess.Popen(
            [sys.executable, str(PEER), kind, str(number), str(COUNT), folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def tell(self, **document: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps(document), file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        assert self.process.stdout is not None
        alarm = threading.Timer(ANSWER_SECONDS, self.process.kill)
        alarm.start()
        line = self.process.stdout.readline()
        alarm.cancel()
        if not line:
            raise RuntimeError(
                f"{self.kind}: a script ended, or did not answer within {ANSWER_SECONDS:.0f} s"
            )
        return json.loads(line)


def turn(kind: str, seconds: float) -> dict[str, Any]:
    """Run four scripts from their start to the end of their training."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        scripts = [Script(kind, number, folder) for number in range(COUNT)]
        try:
            address = ""
            for script in scripts:
                script.tell(address=address)
                address = address or script.answer()["address"]
            for script in scripts[1:]:
                script.answer()
            for script in scripts:
                script.answer()
            for order in ({}, {"seconds": seconds}):
                for script in scripts:
                    script.tell(**order)
            found = [script.answer() for script in scripts]
        finally:
            for script in scripts:
                script.process.kill()
                script.process.wait()
    row: dict[str, Any] = {
        "kind": kind,
        "samples_per_second": round(sum(each["samples_per_second"] for each in found), 1),
        "held_out_loss": round(statistics.median(each["loss"] for each in found), 3),
        "in_step_percent": round(100 * statistics.mean(each["in_step"] for each in found), 1),
        "longest_step_seconds": round(max(each["longest"] for each in found), 2),
    }
    if kind == "ours":
        row["blocked_percent"] = round(100 * statistics.mean(each["blocked"] for each in found), 1)
        row["steps"] = min(each["steps"] for each in found)
    return row


def main() -> int:
    flags = arguments(__doc__ or "")
    kinds = ["silent", "ours", *(["hivemind"] if HIVEMIND else [])]
    seconds, turns = (SECONDS_QUICK, 1) if flags.quick else (SECONDS, TURNS)
    rows = [turn(kind, seconds) | {"turn": number} for number in range(turns) for kind in kinds]

    def figure(kind: str, name: str) -> float:
        return float(statistics.median(row[name] for row in rows if row["kind"] == kind))

    speed = figure("ours", "samples_per_second")
    share = speed / figure("silent", "samples_per_second")
    goals = [
        Goal("samples per second, relative to four silent scripts", share, ">=", SILENT_GOAL),
        Goal("blocked, percent of the time", figure("ours", "blocked_percent"), "<=", BLOCKED_GOAL),
    ]
    if HIVEMIND:  # a comparison is a goal only if both were measured in this run
        ratio = speed / figure("hivemind", "samples_per_second")
        theirs = figure("hivemind", "held_out_loss")
        goals.append(Goal("held-out loss after equal seconds", figure("ours", "held_out_loss"), "<=", theirs))
        if not flags.quick:  # hivemind's stalls come later than a quick run lasts
            goals.append(Goal("samples per second, relative to hivemind", ratio, ">=", RIVAL_GOAL))
    if not flags.quick:  # after only a few steps the loss means nothing
        loss = figure("silent", "held_out_loss")
        goals.append(Goal("held-out loss, ours against silent", figure("ours", "held_out_loss"), "<=", loss))
    return report("optimizer_peers", rows, goals, as_json=flags.json)


if __name__ == "__main__":
    leave(main())
