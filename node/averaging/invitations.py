"""Admission to named averaging runs: of all peers ("open"), of peers that the run's owner invited
("invited"), or also of peers that those invited in turn ("vouched").

The owner is the peer that takes part without an invitation. An invitation is a text for one peer: the owner's
id and a chain of tickets (`partition.run.tickets`). The key that identifies the run in messages also depends
on its owner's id, so two owners may use the same name for different runs. Members send each other their
chains before their messages count.
"""

from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal, get_args

import msgspec
import trio

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.facts import Fact, Signer
from crypto.identity import PEER_ID_BYTES, PeerId, short_peer
from node.averaging.door import TicketGate
from node.averaging.participation import Participation
from node.averaging.signature import owned_run_key
from node.errors import UsageError
from node.seams import Seams
from node.services.driver import Driver
from partition.run import admission as core
from partition.run.admission import Admission, Admissions
from partition.run.tickets import CHAIN_MAX, REVOKED_MAX, Chain, Revocations, TicketStanding, check_chain

Admit = Literal["open", "invited", "vouched"]
ADMITS: tuple[Admit, ...] = get_args(Admit)
INVITATION_SECONDS_MAX = 366 * 24 * 3600.0
INVITATION_BYTES_MAX = 16_384
PREFIX = "peerloom-invitation-"
SHOW_SECONDS = 1.0
"""Seconds between two searches for participants that have shown no tickets, and for expired tickets."""
REVOKED_FOLDER = "averaging"
REVOKED_BYTES_MAX = 512 * REVOKED_MAX

Subject = Annotated[bytes, msgspec.Meta(min_length=PEER_ID_BYTES, max_length=PEER_ID_BYTES)]
Publish = Callable[[PeerId, RemoteProtocolError], None]


class Invitation(msgspec.Struct, frozen=True, array_like=True):
    """An invitation for one peer: the run's owner, its kind of admission, and the tickets."""

    owner: Subject
    admit: Literal["invited", "vouched"]
    chain: Chain


def invitation_text(invitation: Invitation) -> str:
    """Return an invitation as a text."""
    return PREFIX + urlsafe_b64encode(encode(invitation)).decode().rstrip("=")


def read_invitation(text: str) -> Invitation:
    """Return the invitation in a text. Raises UsageError."""
    data = text.strip().removeprefix(PREFIX)
    try:
        found: Invitation = decode(
            urlsafe_b64decode(data + "=" * (-len(data) % 4)), Invitation, bytes_max=INVITATION_BYTES_MAX
        )
    except (Base64Error, ValueError, RemoteProtocolError):
        raise UsageError(
            "this text is not an invitation",
            ("copy the whole text that `peerloom runs invite` printed"),
        ) from None
    return found


def check_admit(admit: str, invitation: str) -> None:
    """Raise UsageError if the kind of admission and the invitation contradict each other."""
    if admit not in ADMITS:
        raise UsageError(f"admit: {admit!r}: want one of {', '.join(ADMITS)}")
    if admit == "open" and invitation:
        raise UsageError('an invitation requires admit="invited" or admit="vouched"')


class Invitations:
    """The invitations of one node. `run` drives it."""

    def __init__(self, seams: Seams, signer: Signer, refuse: Publish) -> None:
        self._seams = seams
        self._signer = signer
        self._admissions = Admissions()
        self._runs: dict[bytes, Participation] = {}
        self._doors: dict[bytes, TicketGate] = {}
        self._driver = Driver(
            self._admissions,
            core.PROTOCOL,
            core.Message,
            message_bytes_max=core.MESSAGE_BYTES_MAX,
            network=seams.network,
            clock=seams.clock,
            publish=self._on_event,
            refuse=refuse,
        )
        self.run = self._driver.run

    async def door(self, name: str, admit: str, text: str) -> TicketGate | None:
        """Return the gate of the run with this name, which this node owns or is invited to; None if all peers
        may take part. Raises UsageError."""
        check_admit(admit, text)
        if admit == "open":
            return None
        owner, chain = self._signer.peer, Chain()
        if text:
            invitation = read_invitation(text)
            if invitation.admit != admit:
                raise UsageError(
                    f"run {name!r}: the invitation is for admit={invitation.admit!r}, not {admit!r}"
                )
            owner, chain = PeerId(invitation.owner), invitation.chain
        key, wall = owned_run_key(name, owner), self._seams.swarm_clock.wall()
        if text:
            self._check(name, key, owner, chain, wall)
        chain_max = 1 if admit == "invited" else CHAIN_MAX
        if len(chain) > chain_max:
            raise UsageError(f"run {name!r}: admit='invited' requires an invitation by the owner itself")
        known = await self._load(key, owner)
        admission = Admission(
            self._signer, key, owner, chain, wall=wall, chain_max=chain_max, revocations=known.facts
        )
        if admission.ended:
            raise UsageError(f"run {name!r}: this node may not take part: {admission.ended}")
        return TicketGate(admission, self._seams.swarm_clock, partial(self._show, admission))

    def _check(self, name: str, key: bytes, owner: PeerId, chain: tuple[Fact, ...], wall: float) -> None:
        if not chain:
            raise UsageError(f"run {name!r}: the invitation has no ticket")
        try:
            tickets = check_chain(self._signer, key, owner, chain, self._signer.peer)
        except RemoteProtocolError as error:
            hint = f"an invitation is for one peer and one name; this node is {short_peer(self._signer.peer)}"
            raise UsageError(f"run {name!r}: the invitation does not fit: {error}", hint) from None
        if TicketStanding(tuple(tickets)).until <= wall:
            raise UsageError(f"run {name!r}: the invitation has expired", "ask the run's owner for a new one")

    # Open runs

    def open(self, run: Participation, door: TicketGate) -> None:
        """Open a run that is guarded by this gate."""
        self._runs[run.key], self._doors[run.key] = run, door
        self._admissions.open(door.admission)

    def close(self, key: bytes) -> None:
        """Close the gate of a run that this node leaves."""
        self._admissions.close(key)
        self._runs.pop(key, None)
        self._doors.pop(key, None)

    async def follow(self, run: Participation, door: TicketGate) -> None:
        """Send tickets to peers that claim to take part, expel peers whose tickets have expired, and store
        revocations. Runs until cancelled."""
        admission, kept = door.admission, door.admission.revocations.facts
        try:
            while True:
                admission.expire(door.clock.wall())
                self._show(admission, tuple(run.roster.claims))
                if kept != admission.revocations.facts:
                    kept = admission.revocations.facts
                    await self._save(run.key, kept)
                await trio.sleep(SHOW_SECONDS)
        finally:
            # A revocation of this peer's own tickets ends its part in the run.
            if kept != admission.revocations.facts:
                with trio.CancelScope(shield=True):
                    await self._save(run.key, admission.revocations.facts)

    def _show(self, admission: Admission, peers: tuple[PeerId, ...] | list[PeerId]) -> None:
        self._driver.command(lambda now: self._admissions.drained(admission, admission.show(now, peers)))

    def _on_event(self, event: core.Event) -> None:
        run = self._runs.get(event.run)
        if run is None:
            return
        match event:
            case core.PeerAdmitted(peer=peer):
                run.admitted(peer)
            case core.Expelled(peer=peer, reason=reason) if peer == self._signer.peer:
                run.end(f"this node may not take part any more: {reason}")
            case core.Expelled(peer=peer, reason=reason):
                run.expelled(peer, reason)

    # Commands

    def invite(self, name: str, peer: PeerId, seconds: float, admit: str = "") -> str:
        """Return an invitation for a peer to one of this node's own runs, or to a run that it takes part in
        and in which members may vouch for peers. `admit` is the kind of admission of a run that is not open
        here. Raises UsageError."""
        if not 0 < seconds <= INVITATION_SECONDS_MAX:
            raise UsageError(f"an invitation must last more than 0 and at most {INVITATION_SECONDS_MAX:g} s")
        wall, door = self._seams.swarm_clock.wall(), self._find(name)
        if peer == self._signer.peer:
            raise UsageError("a node does not need an invitation of its own")
        if door is None:
            owner, kind = self._signer.peer, admit or "invited"
            if kind not in ("invited", "vouched"):
                raise UsageError(f"admit: {kind!r}: an invitation requires admit='invited' or 'vouched'")
            admission = Admission(self._signer, owned_run_key(name, owner), owner, ())
        else:
            admission, owner = door.admission, door.admission.requester
            kind = door.admit
            if admit and admit != kind:
                raise UsageError(f"run {name!r} has admit={kind!r} here, not {admit!r}")
        if not admission.can_vouch:
            raise UsageError(
                f"run {name!r}: this node may not invite peers: {admission.ended or 'only the owner may'}"
            )
        chain = admission.extended(peer, wall, wall + seconds)
        return invitation_text(Invitation(owner, kind, chain))  # type: ignore[arg-type]  # checked above

    async def revoke(self, name: str, peer: PeerId) -> int:
        """Revoke a peer's invitation to one of this node's own runs. Return how many other members were sent
        the revocation immediately; if the run is not open here, they get it when it is. Raises UsageError."""
        door, own = self._find(name), self._signer.peer
        if door is not None and not door.admission.is_requester:
            raise UsageError(
                (f"run {name!r}: only its owner can revoke invitations"),
                f"ask {short_peer(door.admission.requester)}",
            )
        if peer == own:
            raise UsageError(f"run {name!r} is this node's own: close it instead")
        wall, key = self._seams.swarm_clock.wall(), owned_run_key(name, own)
        if door is None:
            known = await self._load(key, own)
            admission = Admission(self._signer, key, own, (), wall=wall, revocations=known.facts)
            admission.revoke(peer, wall)
            await self._save(key, admission.revocations.facts)
            return 0
        admission = door.admission
        count = len(set(admission.admitted) - {peer})
        self._driver.command(lambda _: self._admissions.drained(admission, admission.revoke(peer, wall)))
        await self._save(key, admission.revocations.facts)
        return count

    def knows(self, name: str) -> bool:
        """Return whether this node takes part in a closed run with this name."""
        return self._find(name) is not None

    def _find(self, name: str) -> TicketGate | None:
        return next((self._doors[key] for key, run in self._runs.items() if run.name == name), None)

    async def _load(self, key: bytes, owner: PeerId) -> Revocations:
        known = Revocations(self._signer, key, owner)
        data = await self._seams.executor.run(partial(self._seams.storage.read, _revoked_name(key)))
        if data is not None:
            try:
                known.learn(decode(data, list[Fact], bytes_max=REVOKED_BYTES_MAX))
            except RemoteProtocolError:
                known = Revocations(self._signer, key, owner)  # damaged: members send them again
        return known

    async def _save(self, key: bytes, facts: tuple[Fact, ...]) -> None:
        write = partial(self._seams.storage.write, _revoked_name(key), encode(list(facts)))
        await self._seams.executor.run(write)


def _revoked_name(key: bytes) -> str:
    return f"{REVOKED_FOLDER}/{key.hex()}.revoked"
