"""`me.optimizer(...)`: an optimizer of torch that trains with peers, and otherwise behaves like the optimizer
it wraps.

    optimizer = me.optimizer(torch.optim.AdamW(model.parameters()), run_id="cifar", target_batch_size=4096)
    optimizer = me.optimizer(torch.optim.AdamW(model.parameters()), run_id="cifar", local_steps=50)

With a target batch, gradients gather over all peers until the batch is full. Then all peers make the same
step with the mean gradient, weighted by samples. With local steps, each peer trains by itself. Every
`local_steps` steps its tensors are averaged with those of a group, in the background: `step` only copies the
tensors and, later, adds the difference.

A peer that is alone in its run gets bit for bit the results of the wrapped optimizer (with a target batch: if
one batch fills it). Peers, rounds and states can fail; training goes on, and `status` says why. Programming
errors are raised where they are made: a sparse gradient, or a first step that does not show how many samples
it has.

`clip_grad_norm_` before `step` clips this peer's own gradient; `clip_grad_norm=` clips the mean of a target
batch. A `GradScaler` unscales before `step` and skips batches that are not finite, which then do not count.
"""

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from blake3 import blake3

from gossip.averaging.catalogue import EVERY_ROUND
from gossip.averaging.group import Aggregate
from gossip.averaging.robust.reduction import Vector
from gossip.claims import LikelySteps
from node.averaging.rounds import Round, RoundWish
from node.averaging.signature import Row
from node.optimizer.batch_round import await_round
from node.optimizer.catching_up import CatchUpAttempts
from node.optimizer.differences import Differences, classes_of
from node.optimizer.gathered import GatheredGradients
from node.optimizer.handout import Handout
from node.optimizer.health import Health
from node.optimizer.hyperparameters import settings_of
from node.optimizer.local_rounds import LocalRounds
from node.optimizer.place import RunPlace
from node.optimizer.plugins import own_codecs
from node.optimizer.position import RunPosition
from node.optimizer.samples import SampleCounter
from node.optimizer.schedule import GlobalScheduler, Schedules
from node.optimizer.session import TrainingSession
from node.optimizer.settings import Settings, Stats
from node.optimizer.state import outer_of
from node.optimizer.status import StatusLine
from node.optimizer.takeover import Takeover
from node.optimizer.tracked import TrackedOptimizer
from node.optimizer.trained import TrainedTensors
from node.optimizer.waiting import Waits
from node.optimizer.wishes import round_wish
from node.text import counted

log = logging.getLogger("peerloom")
POLL_SECONDS = 0.02
TOLD_SECONDS = 1.0
"""Time within which peers have reported whether a round succeeded."""


class PeerOptimizer(TrackedOptimizer):
    """An optimizer that trains with peers; see the module.

    Made by `node.sync(...).optimizer(...)`. Long because its two ways to step share counting, averaging and
    catching up.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], model: torch.nn.Module | None, settings: Settings
    ) -> None:
        """Raises TypeError or ValueError for optimizers that cannot be wrapped, or that share a parameter."""
        super().__init__(optimizers)
        self.settings = settings
        self._trained = TrainedTensors(self._inner, model)
        self._counter = SampleCounter(self._trained.all_parameters, settings.batch_size)
        self._place: RunPlace | None = None
        self._differences: Differences | None = None
        self._session: TrainingSession | None = None
        self._schedules = Schedules(self._inner)
        self.global_step = 0
        self._lineage = self._trained.tensors.digest()
        self._position = RunPosition(settings.local_steps)
        self._takeover = Takeover(self._trained.tensors, self._inner, self._trained.counts, settings.own_loss)
        self._handout = Handout(
            self._trained.tensors, self._inner, self._trained.counts, settings.local_steps
        )
        self._waits = Waits(settings.run_id)
        self._catching_up = CatchUpAttempts(self._position, self._takeover, settings.local_steps)
        self._gathered = GatheredGradients(self._trained)
        self._local = LocalRounds(settings, self._trained, self._inner)
        self._codecs = own_codecs(settings.codec, self._trained.tensors.dtype)
        self._step_seconds = 0.0
        self._used = b""
        self._stepped_at = 0.0
        self._stats = Stats()
        self._line = StatusLine("not in a run yet")
        self._health = Health()

    # The interface of a torch optimizer, and more

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero gradients like the wrapped optimizer. Samples of unused gradients no longer count."""
        super().zero_grad(set_to_none)
        self._counter.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, plus the global step under the key `peerloom`."""
        return {**super().state_dict(), "peerloom": {"global_step": self.global_step}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class or of the plain optimizer. A run's newer state replaces it later."""
        super().load_state_dict(state_dict)
        step = int(state_dict.get("peerloom", {}).get("global_step", 0))
        if step > self.global_step:
            self.global_step = step
            self._position.moved(step, self._stats.rounds)
            self._schedules.move_to(self.global_step)

    def step(self, closure: Callable[[], Any] | None = None, samples: int | None = None) -> Any:
        """Make a step, or a part of one.

        `samples`: the number of samples in the gradients, if they cannot be counted. A closure is called
        once, before the step, and its result is returned. Raises ValueError at the first step if the number
        of samples is unknown, and ForkedChild in a forked child of the training process.
        """
        self._refuse_in_child()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        begun = time.perf_counter()
        if self._stepped_at:
            self._step_seconds = 0.9 * self._step_seconds + 0.1 * (begun - self._stepped_at)
        self._look_at_tensors()
        is_needed = self.settings.local_steps is None or self.settings.weighting == "samples"
        count = self._counter.of_step(samples, self.settings.run_id, is_needed=is_needed)
        inside = self._step_local(count) if self.settings.local_steps else self._step_target(count)
        self._quietly(self._tell)
        self._quietly(self._share)
        self._stepped_at = time.perf_counter()
        blocked = self._stats.blocked_seconds + self._stepped_at - begun - inside
        self._update(blocked_seconds=blocked, step_samples=count)
        return loss

    # Further properties for users

    @property
    def stats(self) -> Stats:
        """Return the statistics of this peer and its run."""
        if self._session is not None:
            view = self._session.view
            self._update(peers=view.peers, total_samples=self._total_samples())
        self._update(global_step=self.global_step, samples=self._gathered.samples)
        return self._stats

    def scheduler(self, make: Any, **options: Any) -> GlobalScheduler:
        """Return `make(optimizer, **options)`, a learning rate scheduler of torch, as a function of the run's
        global step, so a peer that joins late has the same learning rate as the others. `make` gets a
        stand-in of the optimizer. Raises TypeError or ValueError if it does not depend on the step alone."""
        return self._schedules.add(make, options)

    def finish(self, timeout_seconds: float = 60.0) -> bool:
        """Wait for the current round, and use its result. Return False if it is still running.

        Raises ForkedChild.
        """
        self._refuse_in_child()
        if self._local.is_under_way:
            self._local.wait(timeout_seconds)
            self._quietly(self._use_finished)
        return not self._local.is_under_way

    def average_now(self, timeout_seconds: float = 60.0) -> bool:
        """With local steps: hold a round now, regardless of the step count, and take its whole result,
        regardless of `damping`. Return whether it averaged.

        A current round that still searches for a group is given up first. Raises ForkedChild.
        """
        self._refuse_in_child()
        if not self.finish(0.0):
            self._local.cancel()
            self.finish(timeout_seconds)
        self._look_at_tensors()
        rounds = self._stats.rounds
        self._quietly(self._begin_round, 1.0)
        self.finish(timeout_seconds)
        self._quietly(self._tell)
        return self._stats.rounds > rounds

    def close(self) -> None:
        """Leave the run. The optimizer then behaves like the plain one."""
        self._takeover.cancel()
        if self._session is not None:
            self._session.close()
        self._status = "left the run"

    def _refuse_in_child(self) -> None:
        if self._session is not None:
            self._session.refuse_in_child()

    # Joining

    @property
    def rows(self) -> tuple[Row, ...]:
        """Return name, shape and type of the averaged tensors: equal at all peers that average together."""
        return self._trained.tensors.rows

    def join(self, session: TrainingSession, place: RunPlace, rule: Aggregate) -> None:
        """Take part with this session. If the run has already begun, take over its state first."""
        self._place = place
        self._differences = Differences(self.settings, classes_of(self._inner), rule, self._trained)
        self._enter(session)

    def give_up(self) -> None:
        """Stop, because another optimizer of this script replaces this one."""
        self.close()
        self._status = "left the run: another optimizer of this script has taken its place"

    def _look_at_tensors(self) -> None:
        """If other tensors are trained now, continue with these, and with the peers that train the same."""
        rows = self.rows
        changed = self._trained.look()
        if not changed:
            return
        log.warning("run %r, step %d: this peer %s", self.settings.run_id, self.global_step, changed)
        self._local.start_afresh()
        self._counter.parameters = self._trained.all_parameters
        self._takeover.train(self._trained.tensors, self._trained.counts)
        self._handout.train(self._trained.tensors, self._trained.counts)
        self._codecs = own_codecs(self.settings.codec, self._trained.tensors.dtype)
        self._update(samples_dropped=self._stats.samples_dropped + self._gathered.drop())
        if self._session is None or self._session.error or self._place is None or rows == self.rows:
            return
        if self._differences is not None:
            self._differences.moved_on(rows)
        session = self._quietly(self._place.change, self.rows)
        if session is not None:
            self._enter(session)

    def _enter(self, session: TrainingSession) -> None:
        self._session = session
        self._status = "joining"
        self._quietly(self._catch_up_if_behind)
        self._position.is_joined = True
        self._quietly(self._tell)
        self._quietly(self._local.begin_strategy)
        # For peers that begin at the same time: this script may load its data for minutes before its first
        # step. The copy is made before there are gradients, so it does not raise the peak of memory.
        self._quietly(self._share, is_first=True)
        if self._status == "joining":
            self._status = self._alone_or_not()

    def _state_to_take(self) -> LikelySteps | None:
        """Return the state of other peers that this peer takes over now, or None."""
        if self._session is None or self._catching_up.is_paused:
            return None
        return self._position.state_to_take(self.global_step, self._lineage, self._others, self._voices)

    def _catch_up_if_behind(self) -> bool:
        """Load the state of other peers if they are further or took other steps. Return whether this peer is
        behind: the state was loaded, or is on its way."""
        likely = self._state_to_take()
        if likely is None:
            self._takeover.cancel()
            return False
        return self._catch_up(likely)

    def _catch_up(self, likely: LikelySteps) -> bool:
        assert self._session is not None
        say = partial(self._say_waiting, "catching up")
        found = self._catching_up.attempt(self._session, likely, self.global_step, say)
        self._update(states_refused=self._takeover.refused_count)
        if found is None:
            return True
        if isinstance(found, str):
            self._status = f"behind the run: {found}"
            return False
        self._local.begin_strategy(outer_of(found, self._trained.tensors))
        rounds = self._stats.rounds
        if self.settings.strategy in EVERY_ROUND:
            rounds = max(rounds, self._position.rounds_of(found.table.rounds, self._others))
        self.global_step, self._lineage = found.table.step, found.table.lineage
        self._position.moved(self.global_step, rounds)
        self._update(
            states_loaded=self._stats.states_loaded + 1,
            samples_dropped=self._stats.samples_dropped + self._gathered.drop(),
            rounds=rounds,
        )
        self._schedules.move_to(self.global_step)
        self._used = b""  # other peers made that step
        self._status = f"caught up with step {self.global_step}"
        return True

    def _say_waiting(self, where: str, what: str, seconds: float, end: str) -> None:
        self._status = self._waits.said(where, what, seconds, end, self._step_seconds)

    # Local steps

    def _step_local(self, samples: int) -> float:
        """Make the wrapped step, and perhaps begin or use a round. Return how long the step took."""
        self._quietly(self._use_finished)
        seconds = self._step_wrapped()
        self.global_step += 1
        self._position.made_step(self.global_step, is_common=False)
        self._local.stepped(samples)
        self._schedules.move_to(self.global_step)
        if self._local.is_due:
            self._quietly(self._begin_round, self.settings.damping)
        return seconds

    def _begin_round(self, damping: float) -> None:
        if self._session is None:
            return
        if self._session.view.peers == 0:
            self._local.put_off()
            self._status = self._alone_or_not()
            return
        if self._local.is_under_way:
            if self._local.is_passed_over:
                self._update(rounds_skipped=self._stats.rounds_skipped + 1)
            return
        is_behind = self._catch_up_if_behind()
        needs_all = self.settings.strategy in EVERY_ROUND
        if not is_behind and needs_all and self._position.has_missed_round(self._stats.rounds, self._others):
            # Others held a round in which this peer should have taken part according to its strategy.
            is_behind = self._catch_up(self._position.local_state(self._others))
        if is_behind:
            return
        vector = self._local.copy()
        if not self._health.is_finite(self._local.sent, vector):
            self._local.put_off()
            self._update(last_error=self._health.sickness())
            return
        self._local.begin(self._session, vector, self._wanted(None), damping)
        self._status = f"a round is under way, with {self._session.view.peers} peers in the run"

    def _use_finished(self) -> None:
        """Apply the result of a finished round to the tensors."""
        outcome = self._local.use_finished()
        if isinstance(outcome, str):
            self._failed(None, outcome)
        elif outcome is not None and outcome.difference is None:
            self._failed(outcome.round, outcome.round.error)
        elif outcome is not None:
            self._averaged(outcome.round)

    # A target batch

    def _step_target(self, samples: int) -> float:
        """Gather, and step once the common batch is full. Return how long the wrapped step took."""
        target = self.settings.target_batch_size or 1
        gradients = self._trained.gradients()
        if self._session is not None and self._quietly(self._catch_up_if_behind):
            # These gradients belong to a state that has been replaced.
            self._update(samples_dropped=self._stats.samples_dropped + samples)
            return 0.0
        if not samples and not self._gathered.samples:
            self._status = f"step {self.global_step}: this step has no gradients, so it adds none"
            return 0.0
        if self._is_alone and self._gathered.is_empty and samples >= target:
            # Nothing to gather, so the gradients stay bit for bit as autograd left them.
            return self._make_step(None, samples)
        if not self._health.has_finite(self._trained.parameters, gradients):
            dropped = self._stats.samples_dropped + samples
            self._update(samples_dropped=dropped, last_error=self._health.sickness())
            return 0.0
        self._gathered.add(gradients, samples)
        if (total := self._total_samples()) < target:
            others = counted(0 if self._session is None else self._session.view.peers, "other peer")
            self._status = f"step {self.global_step}: {total} of {target} samples, {others}"
            return 0.0
        return self._average_gradients(target)

    def _average_gradients(self, target: int) -> float:
        """Hold the round of this global step. Return how long the wrapped step took, 0 if it failed."""
        samples, mean = self._gathered.samples, self._gathered.mean()
        made: Round | str = "this peer is alone"
        if not self._is_alone:
            made = self._quietly(self._hold_round, mean, samples) or "the round failed here"
        if isinstance(made, Round) and made.vector is not None:
            self._gathered.completed(made, self._session, self.settings.weighting)
            self._averaged(made)
            return self._make_step(made.vector, samples, made.digest)
        error = made if isinstance(made, str) else made.error
        if not self._is_alone:
            self._failed(made if isinstance(made, Round) else None, error)
        if self._is_alone or ("nobody else was ready" in error and samples >= target):
            return self._make_step(mean, samples)
        self._await_others()
        return 0.0  # keep the accumulated gradients for the next attempt

    def _await_others(self) -> None:
        """Handle a round that failed here. If the others made the step, this peer takes it over; otherwise
        all try again. It takes a moment until their reports arrive."""
        begun = time.perf_counter()
        while self._session is not None and time.perf_counter() - begun < TOLD_SECONDS:
            if self._state_to_take() is not None:
                self._quietly(self._catch_up_if_behind)
                return
            self._share()
            time.sleep(POLL_SECONDS)

    def _hold_round(self, mean: Vector, samples: int) -> Round | str:
        """Wait for this step's round, up to a reasonable limit."""
        session, where = self._session, f"step {self.global_step}"
        assert session is not None
        self._tell()
        weight = float(samples) if self.settings.weighting == "samples" else 1.0
        pending = session.average(mean, weight, self._wanted(self.global_step))
        made = await_round(
            pending,
            self.settings.round_seconds_max,
            look_seconds=lambda: session.look_seconds,
            say=lambda waited, end: self._say_waiting(where, session.status or "a group", waited, end),
            share=self._share,
            is_passed=lambda: self._state_to_take() is not None,
        )
        if isinstance(made, Round):
            self._update(waited_seconds=self._stats.waited_seconds + made.waited_seconds)
        return made

    def _make_step(self, mean: Vector | None, samples: int, digest: bytes = b"") -> float:
        """Step with this mean gradient; None means the present gradients. `digest` is the round's. A step
        made without a round has none, and leads to a unique state."""
        if mean is not None:
            for slot, gradient in zip(
                self._trained.parameters.slots, self._trained.parameters.views(mean), strict=True
            ):
                slot.tensor.grad = gradient
        if self.settings.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(
                [slot.tensor for slot in self._trained.parameters.slots], self.settings.clip_grad_norm
            )
        self._used = settings_of(self._inner)
        seconds = self._step_wrapped()
        self._lineage = blake3(self._lineage + (digest or secrets.token_bytes())).digest()
        self.global_step += 1
        self._position.made_step(self.global_step, is_common=bool(digest))
        total = self._total_samples() or samples
        self._gathered.drop()
        self._schedules.move_to(self.global_step)
        if self._session is not None:
            self._session.stepped(self.global_step, total)
            members = self._stats.last_round.members if digest and self._stats.last_round else 1
            self._handout.made_step(self.global_step - 1, self._session.view.reports, members)
        self._status = self._alone_or_not()
        return seconds

    # Common

    @property
    def _is_alone(self) -> bool:
        """Return whether no other peer at this position has a state. Newcomers without a state do not take
        part in rounds yet."""
        return self._session is None or self._position.is_alone(self._others)

    def _wanted(self, number: int | None) -> RoundWish:
        return round_wish(self.settings, number, self._step_seconds, self._codecs, self._local.strategy)

    def _total_samples(self) -> int:
        """Return the number of samples gathered by this peer and all peers at the same step."""
        awaited = self._session.view.awaited if self._session else {}
        return self._gathered.total(self.global_step, self.settings.target_batch_size or 0, awaited)

    def _averaged(self, made: Round) -> None:
        self._health.averaged()
        self._catching_up.averaged()
        self._update(rounds=self._stats.rounds + 1, last_round=made, last_error="")
        self._position.made_round(self.global_step, self._stats.rounds)
        rule = "" if made.aggregate == "mean" else f", {made.aggregate} survives {made.liars_max} liars"
        self._status = f"averaged with {len(made.shares)} peers in {made.seconds:.1f} s{rule}"

    def _failed(self, made: Round | None, error: str) -> None:
        self._health.failed(error)
        failed = self._stats.rounds_failed + 1
        self._update(rounds_failed=failed, last_round=made or self._stats.last_round, last_error=error)
        self._status = f"nothing was averaged: {error}"

    def _tell(self) -> None:
        if self._session is not None and self._position.is_joined:
            self._session.tell(
                step=self.global_step,
                samples=self._gathered.samples,
                rounds=self._stats.rounds,
                lineage=self._lineage,
                has_state=not self._position.lacks_state,
                settings=self._used,
            )

    def _share(self, *, is_first: bool = False) -> None:
        """Copy the state if a peer waits for it, or if this peer is just joining."""
        if self._session is not None and not self._position.lacks_state:
            share = self._handout.share_first if is_first else self._handout.share
            share(self._session, self.global_step, self._stats.rounds, self._lineage, self._local.strategy)
