"""Proof that a member of an averaging attempt lied: two facts of one kind that it signed, which differ.

Any member of the run can check it, even one outside of the attempt: the group names the run and the attempt,
and the signatures name the author. An honest member signs one commitment, one have-set and one seal in an
attempt, and a restarted process has no part in the attempts of its former life.
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
"""A full group takes 5 KiB, two of its have-sets 8 KiB."""
Statement = CommitmentBody | HaveBody | SealBody
BODIES: dict[str, type[Statement]] = {
    COMMITMENT_PURPOSE: CommitmentBody,
    HAVE_PURPOSE: HaveBody,
    SEAL_PURPOSE: SealBody,
}


class Evidence(msgspec.Struct, frozen=True, array_like=True, tag="evidence"):
    """Two facts for one `purpose` by one member of this group's attempt."""

    group: Group
    purpose: Literal["averaging-commitment", "averaging-have", "averaging-seal"]
    first: Fact
    second: Fact


def liar_of(evidence: Evidence, signer: Signer) -> PeerId:
    """Return the member proved to have lied. Raises RemoteProtocolError if there is no proof."""
    author = PeerId(evidence.first.author)
    if evidence.second.author != evidence.first.author or author not in evidence.group.peers:
        raise RemoteProtocolError("evidence of two authors, or of one outside of the group")
    if evidence.first.body == evidence.second.body:
        raise RemoteProtocolError("evidence of two facts that say the same")
    attempt = evidence.group.id
    for fact in (evidence.first, evidence.second):
        body: Statement = decode(fact.body, Statement, bytes_max=FACT_BODY_BYTES_MAX)
        if body.attempt != attempt or not isinstance(body, BODIES[evidence.purpose]):
            raise RemoteProtocolError("evidence from another attempt")
        signer.check(evidence.purpose, fact)
    return author
