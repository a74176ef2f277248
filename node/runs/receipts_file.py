"""The contributions that a node keeps across restarts: one blob in its data folder."""

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from crypto.encoding import decode, encode
from crypto.errors import RemoteProtocolError
from crypto.identity import PeerId
from node.seams import Storage
from partition.plan.plan import Peer
from partition.run.receipts import PEERS_MAX, Account, Receipt

EARNED_MAX = 1_024
"""Maximum number of `earned` receipts (for this node's own work), and also of `issued` receipts (for the work
of others that this node measured). The receipts for the most work are kept."""
NAME = "receipts"
FILE_BYTES_MAX = 4 << 20

_Amount = Annotated[float, msgspec.Meta(ge=0, le=1e30)]
_AccountRow = tuple[Peer, _Amount, _Amount]
_Accounts = Annotated[tuple[_AccountRow, ...], msgspec.Meta(max_length=PEERS_MAX)]


class ReceiptsFile(msgspec.Struct, frozen=True, array_like=True):
    """The stored receipts and accounts. Each account is a peer's FLOPs at a wall time. The FLOPs decay
    exponentially after that time."""

    earned: Annotated[tuple[Receipt, ...], msgspec.Meta(max_length=EARNED_MAX)] = ()
    issued: Annotated[tuple[Receipt, ...], msgspec.Meta(max_length=EARNED_MAX)] = ()
    given: _Accounts = ()
    worked: _Accounts = ()
    averaged: _Accounts = ()

    @property
    def accounts(self) -> tuple[dict[PeerId, Account], dict[PeerId, Account], dict[PeerId, Account]]:
        """Three tables of accounts: `given` (work of each peer for this node), `worked` (work of this node
        for each peer), and `averaged` (data that each peer sent in rounds of averaging, counted as FLOPs)."""
        given, worked, averaged = (
            {PeerId(peer): (flops, at) for peer, flops, at in rows}
            for rows in (self.given, self.worked, self.averaged)
        )
        return given, worked, averaged


def read_receipts(storage: Storage) -> ReceiptsFile:
    """Return the stored contributions; empty if the file is missing, damaged or written by a different
    version."""
    data = storage.read(NAME)
    if data is None:
        return ReceiptsFile()
    try:
        found: ReceiptsFile = decode(data, ReceiptsFile, bytes_max=FILE_BYTES_MAX)
    except RemoteProtocolError:
        return ReceiptsFile()
    return found


def write_receipts(
    storage: Storage,
    earned: Sequence[Receipt],
    issued: Sequence[Receipt],
    given: Mapping[PeerId, Account],
    worked: Mapping[PeerId, Account],
    averaged: Mapping[PeerId, Account],
) -> None:
    """Replace the stored contributions. Raises OSError."""
    accounts = [
        tuple((peer, *account) for peer, account in rows.items()) for rows in (given, worked, averaged)
    ]
    storage.write_soon(NAME, encode(ReceiptsFile(tuple(earned), tuple(issued), *accounts)))
