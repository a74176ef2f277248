"""Recovery of the runs that this node was in when it was stopped: it follows their chains again and restores
its stages."""

from typing import Protocol

from crypto.encoding import decode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, Signer
from node.protocols.manifest import MANIFEST_BYTES_MAX, Run, check_run
from node.runs.archive import RUNS_FOLDER, ArchiveShell
from node.runs.chain import chain_name, history_name, read_entered
from node.runs.member import RunMember
from node.runs.steering import revision_name
from node.seams import Seams
from partition.plan.chain import base_plan

RUN_FILE = "run"


def run_name(run: str) -> str:
    """Return the storage name of a run's manifest while this node is in the run."""
    return f"{RUNS_FOLDER}/{run}/{RUN_FILE}"


def forget_files(seams: Seams, run: str) -> None:
    """Delete the files that only an active run needs; its checkpoints stay."""
    for name in (chain_name(run), history_name(run), run_name(run), revision_name(run)):
        seams.storage.delete(name)


class RecoveryService(Protocol):
    """The part of `node.runs.runs.Runs` that this file uses."""

    seams: Seams
    signer: Signer
    archive: ArchiveShell

    def accept(self, run: Run) -> RunMember: ...


async def recover(runs: RecoveryService) -> None:
    """Rejoin the runs whose files are stored here."""
    storage = runs.seams.storage
    for name in storage.sizes(RUNS_FOLDER):
        run_text, _, file = name.removeprefix(f"{RUNS_FOLDER}/").partition("/")
        if file != RUN_FILE:
            continue
        data, durable = storage.read(name), storage.read(chain_name(run_text))
        try:
            fact: Fact = decode(data or b"", Fact, bytes_max=2 * MANIFEST_BYTES_MAX)
            run = check_run(runs.signer, fact)
            if runs.archive.is_over(run.id):
                await runs.archive.close(run)
                forget_files(runs.seams, run.text)
                continue
            base = base_plan(durable or b"")
            entered = read_entered(storage, run_text)
            runs.accept(run).begin(base, entered, durable or b"")
        except (RemoteProtocolError, ValueError):
            storage.delete(name)  # damaged, or written by an older version: this node is not in such a run
