"""Proof that a member of an averaging attempt lied: two different facts of the same kind that it signed.

Any member of the run can check the proof, even one outside the attempt: the group names the run and the
attempt, and the signatures identify the author. An honest member signs one commitment, one have-set and one
seal per attempt, and after a restart its process no longer takes part in earlier attempts.
"""

from typing import Literal

import msgspec

from crypto.encoding import decode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, Signer
from crypto.identity import PeerId
from gossip.averaging.group import Group
from gossip.averaging.messages import (
    COMMITMENT_PURPOSE,
    FACT_BODY_BYTES_MAX,
    HAVE_PURPOSE,
    SEAL_PURPOSE,
    CommitmentBody,
    HaveBody,
    SealBody,
)

PROTOCOL = "/peerloom/proofs/1"
EVIDENCE_BYTES_MAX = 32 * 1024
"""Maximum size of a proof. A full group takes 5 KiB, and two of its have-sets 8 KiB."""
Statement = CommitmentBody | HaveBody | SealBody
BODIES: dict[str, type[Statement]] = {
    COMMITMENT_PURPOSE: CommitmentBody,
    HAVE_PURPOSE: HaveBody,
    SEAL_PURPOSE: SealBody,
}


class Evidence(msgspec.Struct, frozen=True, array_like=True, tag="evidence"):
    """Two facts with the same `purpose` by one member of this group's attempt."""

    group: Group
    purpose: Literal["averaging-commitment", "averaging-have", "averaging-seal"]
    first: Fact
    second: Fact


def liar_of(evidence: Evidence, signer: Signer) -> PeerId:
    """Return the member that is proved to have lied. Raises RemoteProtocolError if the evidence proves
    nothing."""
    author = PeerId(evidence.first.author)
    if evidence.second.author != evidence.first.author or author not in evidence.group.peers:
        raise RemoteProtocolError("evidence by two different authors, or by an author outside the group")
    if evidence.first.body == evidence.second.body:
        raise RemoteProtocolError("evidence whose two facts are identical")
    attempt = evidence.group.id
    for fact in (evidence.first, evidence.second):
        body: Statement = decode(fact.body, Statement, bytes_max=FACT_BODY_BYTES_MAX)
        if body.attempt != attempt or not isinstance(body, BODIES[evidence.purpose]):
            raise RemoteProtocolError("evidence from a different attempt")
        signer.check(evidence.purpose, fact)
    return author
