"""Names the difference in training that prevents a peer of the same run from averaging with this one.

Peers send a hash of the tensors that they train and of their settings. It is compared with the hashes of
likely alternatives, each of which differs in one thing. If none matches, it is only known that the peer
differs.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from gossip.averaging.group import Aggregate
from node.averaging.signature import Row, signatures_of
from node.optimizer.settings import Settings
from node.optimizer.trained import TrainedTensors, listed

Rows = Sequence[Row]
CODECS = ("float32", "bfloat16", "float16", "int8", "int4")
CLASSES = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adafactor", "NAdam", "RAdam", "Muon")
POWERS_MAX = 21
"""Number of powers of two that are tried as the others' `target_batch_size`: up to a million."""
ALTERNATIVES_MAX = 60
"""Maximum number of alternatives. Each is a hash of all names and shapes; for 300 tensors they take some 20
ms."""
ROWS_MAX = 4_096
"""Maximum number of tensors for which differences are named. With more, it is only known that peers
differ."""


def kind_of(settings: Settings, classes: str) -> str:
    """Return the settings that must agree in addition to the tensors: the way of training, and the
    optimizers' classes."""
    if settings.local_steps is not None:
        moments = " moments" if settings.average_moments else ""
        own = "" if settings.strategy == "average" else f" {settings.strategy}"
        return f"local {classes} {settings.codec}{own}{moments}"
    return f"batch {settings.target_batch_size} {classes} {settings.codec} {settings.clip_grad_norm}"


def classes_of(optimizers: Sequence[torch.optim.Optimizer]) -> str:
    """Return the classes of optimizers in the form that peers compare."""
    return ",".join(type(each).__name__ for each in optimizers)


class Differences:
    """Names how others differ from this peer."""

    def __init__(self, settings: Settings, classes: str, rule: Aggregate, trained: TrainedTensors) -> None:
        self._settings = settings
        self._classes = classes
        self._rule = rule
        self._trained = trained
        self._earlier: list[Rows] = []
        self._known: dict[bytes, str] = {}

    def moved_on(self, rows: Rows) -> None:
        """Record that this peer's trained tensors have changed."""
        self._earlier.append(rows)
        self._known = {}

    def texts(self, signatures: Sequence[bytes]) -> list[str]:
        """Return the differences of peers with these hashes, each with the number of peers."""
        if not signatures:
            return []
        if not self._known and len(self._trained.tensors.rows) <= ROWS_MAX:
            for text, kind, rows in self._alternatives():
                if len(self._known) < ALTERNATIVES_MAX:
                    signature, _ = signatures_of(kind, rows, self._rule)
                    self._known.setdefault(signature, text)
            own, rules = signatures_of(kind_of(self._settings, self._classes), self._rows, self._rule)
            self._known |= {each: f'average by aggregate = "{name}"' for each, name in rules.items()}
            self._known.pop(own, None)
        other = "train other tensors, or by other settings (compare optimizer.rows)"
        counted = Counter(self._known.get(each, other) for each in signatures)
        return [f"{count} under this name {text}" for text, count in sorted(counted.items())]

    @property
    def _rows(self) -> Rows:
        return self._trained.tensors.rows

    def _alternatives(self) -> Iterator[tuple[str, str, Rows]]:
        settings, kind = self._settings, kind_of(self._settings, self._classes)
        for rows in reversed(self._earlier[-4:]):
            yield f"still {_difference(rows, self._rows)}", kind, rows
        thawed = self._trained.thawed.rows
        yield _difference(thawed, self._rows), kind, thawed
        yield "were given no model=", kind, self._trained.numbered.rows
        if settings.target_batch_size is not None:
            for power in range(POWERS_MAX):
                other = replace(settings, target_batch_size=2**power)
                yield f"have target_batch_size={2**power}", kind_of(other, self._classes), self._rows
            if settings.clip_grad_norm is not None:
                other = replace(settings, clip_grad_norm=None)
                yield "have no clip_grad_norm=", kind_of(other, self._classes), self._rows
            if settings.strategy == "average":
                other = replace(settings, target_batch_size=None, local_steps=1)
                yield "have local_steps=", kind_of(other, self._classes), self._rows
        for codec in CODECS:
            other = replace(settings, codec=codec)
            yield f'have codec="{codec}"', kind_of(other, self._classes), self._rows
        for name in CLASSES:
            yield f"train by {name}", kind_of(settings, name), self._rows


def _difference(theirs: Rows, own: Rows) -> str:
    """Describe how their trained tensors differ from this peer's."""
    names = {name for name, _, _ in theirs}, {name for name, _, _ in own}
    more = [name for name, _, _ in theirs if name not in names[1]]
    fewer = [name for name, _, _ in own if name not in names[0]]
    parts = [f"train {listed(more)} too"] * bool(more) + [f"do not train {listed(fewer)}"] * bool(fewer)
    return " and ".join(parts) or "train tensors of other shapes"
