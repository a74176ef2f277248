"""`/peerloom/receipts/2`: the messages about receipts of contribution."""

from typing import Annotated

import msgspec

from crypto.facts import Fact
from partition.run.receipts import ROWS_MAX, Receipt

RECEIPTS_PROTOCOL = "/peerloom/receipts/2"
QUESTION_BYTES_MAX = 1_024
ANSWER_BYTES_MAX = 32 * 1024


class OfferReceipt(msgspec.Struct, frozen=True, tag="offer"):
    """To a provider: my measurement of your work. Answered by Accepted, or Nothing."""

    measured: Fact


class ShowReceipts(msgspec.Struct, frozen=True, tag="show"):
    """Anybody to anybody: show the receipts of your work. Answered by Shown."""


class AcceptedReceipt(msgspec.Struct, frozen=True, tag="accepted"):
    """The provider's fact over the same body."""

    accepted: Fact


class NoReceipt(msgspec.Struct, frozen=True, tag="nothing"):
    """This node has no part in that run, or did less than that."""


class ShownReceipts(msgspec.Struct, frozen=True, tag="shown"):
    """Receipts of the author's work, the largest first."""

    receipts: Annotated[tuple[Receipt, ...], msgspec.Meta(max_length=ROWS_MAX)]


Question = OfferReceipt | ShowReceipts
Answer = AcceptedReceipt | NoReceipt | ShownReceipts
