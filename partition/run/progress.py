"""The number of a run's committed steps, as one member knows and claims it.

Each step is displayed once, whichever committer reports it: a new committer may not know which steps its
predecessor reported.
"""

from partition.plan.paxos import PaxosChain
from partition.plan.paxos_messages import ChainHead
from partition.plan.plan import Plan


class RunProgress:
    """The progress of one run. `step` steps are committed; `furthest` is the highest number of steps ever
    committed."""

    def __init__(self, samples_per_step: int) -> None:
        self.step = 0
        self.furthest = 0
        self._samples_per_step = samples_per_step
        self._shown = 0

    def note(self, step: int) -> None:
        """Note that `step` steps are committed."""
        self.step = step
        self.furthest = max(self.furthest, step)

    def show(self, step: int) -> bool:
        """Note that the step of this number was committed; return True the first time, so that it is
        displayed once."""
        if step < self._shown:
            return False
        self._shown = step + 1
        self.note(self._shown)
        return True

    def restored(self, step: int) -> int:
        """Go back to `step`. Return how many steps must be committed again."""
        lost = max(0, self.step - step)
        self.step, self._shown = step, min(self._shown, step)
        return lost

    def steps_of(self, head: ChainHead) -> int:
        """Return the number of steps that a branch claims: its head states steps and samples, and the larger
        number counts."""
        return max(head.step, -(-head.samples // self._samples_per_step))

    def claim(self, chain: PaxosChain, *, hosts: bool) -> None:
        """Announce the progress of this member's branch. `hosts`: this member holds a stage.

        Branches are compared by the highest step that they ever reached, because a claim must not decrease.
        Otherwise each of two branches could give way to an earlier claim of the other.
        """
        head: Plan = chain.head
        chain.say(
            ChainHead(
                run=head.run,
                parent=chain.head_hash,
                fork=head.fork,
                height=head.height,
                step=self.furthest,
                samples=self.furthest * self._samples_per_step,
                hosts=hosts,
            )
        )
