"""The proofs of lies that a node keeps across restarts: one blob in its data folder."""

from collections.abc import Sequence
from typing import Annotated

import msgspec

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Signer
from crypto.identity import PeerId
from gossip.averaging.evidence import EVIDENCE_BYTES_MAX, liar_of
from gossip.averaging.proof_table import KEPT_MAX, KeptProof
from node.seams import Storage

FILE = "averaging-proofs"
FILE_BYTES_MAX = KEPT_MAX * (EVIDENCE_BYTES_MAX + 16)
_Kept = Annotated[tuple[KeptProof, ...], msgspec.Meta(max_length=KEPT_MAX)]


def read_proofs(storage: Storage, signer: Signer) -> list[tuple[PeerId, KeptProof]]:
    """Return the liars with their proofs; empty if the file is damaged, or of a different swarm or
    version."""
    data = storage.read(FILE)
    try:
        kept: tuple[KeptProof, ...] = decode(data or encode(()), _Kept, bytes_max=FILE_BYTES_MAX)
        return [(liar_of(each.evidence, signer), each) for each in kept]
    except RemoteProtocolError:
        return []


def write_proofs(storage: Storage, kept: Sequence[KeptProof]) -> None:
    """Replace the stored proofs. Raises OSError."""
    storage.write(FILE, encode(tuple(kept)))
