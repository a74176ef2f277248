"""The files of an experiment except events.jsonl, which is written during the experiment (`events_file`)."""

import csv
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sim.measures.rows import Row
from sim.scenario import Scenario, to_toml

SUMMARY_NAME = "summary.json"
METRICS_NAME = "metrics.csv"
EVENTS_NAME = "events.jsonl"
SCENARIO_NAME = "scenario.toml"
FILE_NAMES = (SUMMARY_NAME, METRICS_NAME, EVENTS_NAME, SCENARIO_NAME)


def write_files(folder: Path, scenario: Scenario, rows: Iterable[Row], summary: Mapping[str, Any]) -> None:
    """Write the files. The summary is written last and atomically, so if it exists, the others do too."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / SCENARIO_NAME).write_text(to_toml(scenario), encoding="utf-8")
    with (folder / METRICS_NAME).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Row._fields)
        writer.writerows(
            (f"{row.time_seconds:.6g}", row.metric, row.label, f"{row.value:.9g}") for row in rows
        )
    write_whole(folder / SUMMARY_NAME, json.dumps(summary, indent=2) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Replace a file atomically, so that no reader sees half of it."""
    draft = path.with_name(path.name + ".part")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)
