"""The rule for a result that another member proposed, once it has been fetched: pure."""

from typing import Literal

from partition.run.conclusions import Conclusion
from partition.run.ending import Ending


def next_deed(
    ending: Ending, conclusion: Conclusion, *, judges: bool, trusts: bool
) -> Literal["try", "hold", "wait"]:
    """Return what to do with a result that is here: try it, hold it, or wait until more members do.

    `judges`: this member looks at results before it holds them; `trusts`: it holds one that it cannot look
    at.
    """
    if judges and conclusion.weights and not ending.is_decided:
        return "try"
    return "hold" if judges or trusts or ending.is_decided else "wait"
