"""`/peerloom/receipts/2`: the messages about receipts of contribution."""

from typing import Annotated

import msgspec

from crypto.facts import Fact
from partition.run.receipts import ROWS_MAX, Receipt

RECEIPTS_PROTOCOL = "/peerloom/receipts/2"
QUESTION_BYTES_MAX = 1_024
ANSWER_BYTES_MAX = 32 * 1024


class OfferReceipt(msgspec.Struct, frozen=True, tag="offer"):
    """The sender's measurement of a provider's work, sent to that provider. Answered by AcceptedReceipt or
    NoReceipt."""

    measured: Fact


class ShowReceipts(msgspec.Struct, frozen=True, tag="show"):
    """A request from any peer to any other: show the receipts of the recipient's work. Answered by
    ShownReceipts."""


class AcceptedReceipt(msgspec.Struct, frozen=True, tag="accepted"):
    """The same body, signed by the provider as a fact."""

    accepted: Fact


class NoReceipt(msgspec.Struct, frozen=True, tag="nothing"):
    """This node has no part in that run, or did less than the receipt claims."""


class ShownReceipts(msgspec.Struct, frozen=True, tag="shown"):
    """Receipts of the author's work, the largest first."""

    receipts: Annotated[tuple[Receipt, ...], msgspec.Meta(max_length=ROWS_MAX)]


Question = OfferReceipt | ShowReceipts
Answer = AcceptedReceipt | NoReceipt | ShownReceipts
