"""Proofs that members of averaging runs lied: stored, spread to the other members, and used to exclude the
liars.

A node that finds a proof in an attempt, or receives a valid one, sends it once to a few other members of the
run, so it spreads like a rumour. Each node checks the two signatures itself (`gossip.averaging.evidence`).
Proofs are kept across restarts.
"""

from collections.abc import Callable, Collection
from functools import partial

import trio

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Signer
from crypto.identity import PeerId
from gossip.averaging.attempt import Attempt
from gossip.averaging.evidence import EVIDENCE_BYTES_MAX, PROTOCOL, Evidence, liar_of
from gossip.averaging.proof_table import ProofStanding, ProofTable
from node.averaging.proofs_file import read_proofs, write_proofs
from node.averaging.rounds import Gate
from node.containment import keep_running
from node.errors import StreamClosed, Unreachable
from node.protocols.calls import conversation
from node.seams import Seams, Stream, StreamLimits

TOLD_MAX = 6
"""Number of members to which a node sends one proof; with this number, a rumour misses one member in 400."""
INTRODUCED_MAX = 4
"""Maximum number of proofs that one member sends to a newcomer."""
TELL_SECONDS = 10.0
STREAMS = StreamLimits(message_bytes_max=EVIDENCE_BYTES_MAX, streams_per_peer_max=2)
SAVE_SECONDS = 1.0
"""Minimum seconds between two writes of the file, because it has all proofs, and any peer may send further
ones."""


class Proofs:
    """The proofs that a node knows. `members` returns the other members of a run with this key, or None if
    this node is in no such run. `standing` returns a peer's relation to this node in a run; `found` is called
    for each new proof."""

    def __init__(
        self,
        seams: Seams,
        signer: Signer,
        *,
        members: Callable[[bytes], Collection[PeerId] | None],
        standing: Callable[[bytes, PeerId], ProofStanding],
        found: Callable[[bytes, PeerId, str], None],
        refuse: Callable[[PeerId, RemoteProtocolError], None],
    ) -> None:
        self._seams = seams
        self._signer = signer
        self._members = members
        self._found = found
        self._refuse = refuse
        self._table = seams.part(ProofTable)(standing)
        self._unsaved = trio.Event()
        self._nursery: trio.Nursery | None = None
        seams.network.handle(PROTOCOL, self._serve, STREAMS)

    async def run(self, nursery: trio.Nursery) -> None:
        """Read the stored proofs and begin to spread new ones."""
        self._nursery = nursery
        read = partial(read_proofs, self._seams.storage, self._signer)
        self._table.load(await self._seams.executor.run(read))
        nursery.start_soon(keep_running, "keeping of proofs", self._save)

    def is_out(self, run: bytes, peer: PeerId) -> bool:
        """Return whether this peer was proved to lie in the run with this key."""
        return (run, peer) in self._table

    def introduce(self, run: bytes, peer: PeerId) -> None:
        """Send the known proofs, the most relevant first, to a peer that has just joined the run. In a large
        run only some members do this."""
        members = len(self._members(run) or ())
        if self._nursery is None or self._seams.rng.random() * members >= TOLD_MAX:
            return
        proofs = [proof for liar, proof in self._table.of_run(run) if liar != peer]
        for proof in proofs[:INTRODUCED_MAX]:
            self._nursery.start_soon(self._tell, peer, proof)

    def look(self, attempt: Attempt) -> None:
        """Keep and spread the proofs that an attempt has found."""
        for proof in attempt.equivocations:
            self._take(Evidence(attempt.group, proof.purpose, proof.first, proof.second))  # type: ignore[arg-type]  # one of three

    def _take(self, evidence: Evidence, teller: PeerId | None = None) -> None:
        """Keep a valid proof, and pass it on if it is new. Raises RemoteProtocolError if it proves
        nothing."""
        run, author = evidence.group.name, PeerId(evidence.first.author)
        members = self._members(run)
        if members is None or (run, author) in self._table:
            return
        liar_of(evidence, self._signer)
        if not self._table.add(author, evidence):
            return
        self._unsaved.set()
        others = [peer for peer in members if peer not in (author, teller)]
        told = self._seams.rng.sample(others, min(TOLD_MAX, len(others)))
        if self._nursery is not None:
            for peer in told:
                self._nursery.start_soon(self._tell, peer, evidence)
        self._found(run, author, evidence.purpose)

    async def _save(self) -> None:
        """Store the proofs whenever they have changed. Runs until cancelled."""
        while True:
            await self._unsaved.wait()
            self._unsaved = trio.Event()
            await self._seams.executor.run(partial(write_proofs, self._seams.storage, self._table.kept))
            await trio.sleep(SAVE_SECONDS)

    async def _tell(self, peer: PeerId, evidence: Evidence) -> None:
        try:
            talk = conversation(
                self._seams.network,
                peer,
                PROTOCOL,
                seconds=TELL_SECONDS,
                message_bytes_max=EVIDENCE_BYTES_MAX,
            )
            async with talk as stream:
                await stream.send(encode(evidence))
        except (Unreachable, StreamClosed):
            pass  # other members send it too

    async def _serve(self, stream: Stream) -> None:
        evidence: Evidence = decode(await stream.receive(), Evidence, bytes_max=EVIDENCE_BYTES_MAX)
        self._take(evidence, stream.peer)


class HonestGate:
    """A gate that admits the peers of `gate`, or all peers if it is None, except peers that were proved to
    lie in the run."""

    def __init__(self, proofs: Proofs, run: bytes, gate: Gate | None) -> None:
        self._proofs = proofs
        self._run = run
        self._gate = gate

    def admits(self, peer: PeerId) -> bool:
        """Return whether this peer may take part."""
        return not self._proofs.is_out(self._run, peer) and (self._gate is None or self._gate.admits(peer))

    def seen(self, peer: PeerId) -> None:
        """Handle this peer's claim that it takes part."""
        if self._gate is not None:
            self._gate.seen(peer)
