"""This node's membership in one run in local mode: trains, averages, hands its state on, and ends.

There is no plan: members announce themselves (`gossip.roster`), a death makes the groups smaller and spreads
a shard over the others, and one member alone goes on. How the members agree on the end is for
`partition.run.ending`. A requester that takes no stages follows its run without training.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import inf, isfinite

import trio

from crypto.errors import RemoteProtocolError
from crypto.facts import Fact
from crypto.identity import PeerId
from node.averaging.participation import Participation
from node.averaging.signature import signature_of
from node.checkpoints.weights import join_stages, keep, weights_name
from node.errors import StageDiverged, StageFailed, Unreachable, UsageError
from node.events import RunChanged, RunEvaluated, StepCommitted
from node.local.context import Service
from node.local.door import Door
from node.local.keeper import Keeper
from node.local.rounds import Rounds
from node.local.saved import MEMBERS_MAX, SavedRun
from node.local.trainer import LocalTrainer, Stepped
from node.local.verdict import Losses, fault_of, is_usable
from node.pipeline.committer import CORRECT
from node.placement.admission import build_stage_spec
from node.protocols.manifest import Run
from node.protocols.runs import Done, Join
from node.runs.completion import fetch_result
from node.runs.manifest_builder import fits, make_batches
from node.runs.progress import Shown
from partition.model.graph import Graph
from partition.plan.plan import NO_HASH, Plan, StagePlan
from partition.run.admission import Admission
from partition.run.ending import Conclusion, Ending, Evaluated, Sends
from partition.run.local_settings import LocalSettings
from partition.run.messages import REASON_LENGTH_MAX
from partition.stage import StageSpecification

LOOK_SECONDS = 0.5
"""How often the shards and the end follow who takes part."""
SETTLE_SECONDS = 5.0
"""A newcomer listens so long for those that train already."""
RECRUIT_SECONDS = 3.0
"""Between two looks for nodes that could take part."""
DECLINED_SECONDS = 30.0
"""A node that declined is asked again after so long."""
JOIN_SECONDS_MAX = 30.0
CATCH_UPS_MAX = 5
"""Attempts to take over a state, before a newcomer gives up."""
FETCHES_MIN = 5
FETCH_SECONDS = 120.0
"""How often, and for how long, a member tries to fetch a result that others say they hold."""
DIVERGED_MAX = 10
"""Steps in a row that are not finite, as in exact mode."""
LIKELY_ROUNDS = 10
"""A member is hardly so many rounds ahead of most others."""
TOLD_STEPS = 10
"""A step is an event once in so many, and one on a screen."""


def _refused(fault: str) -> str:
    return f"a result that a member proposed is passed over: {fault}"[:REASON_LENGTH_MAX]


def whole_plan(run: Run, graph: Graph, me: PeerId) -> Plan:
    """The one stage of all layers that every member holds, in the form that admission knows."""
    stage = StagePlan(0, len(graph.layers), (me,), (1,))
    return Plan(run.id, NO_HASH, 0, (me,), (me,), run.manifest.microbatches, (stage,))


class LocalMember:
    """One run on this node. `live` drives it until `ended` was called or it has left."""

    def __init__(
        self,
        service: Service,
        run: Run,
        ending: Ending,
        door: Door,
        *,
        is_training: bool,
        holders: Sequence[PeerId],
        tell: Callable[[Ending, Callable[[float], Sends]], None],
    ) -> None:
        """`tell` lets a call act on the core of the end; `holders` may hand over what the run is made of."""
        assert run.manifest.local is not None, "the run is in local mode"
        self.run = run
        self.ending = ending
        self._door = door
        self.is_training = is_training
        self.shown = Shown()
        self.stopped_by: Fact | None = None
        self.is_over = False
        self.begun = trio.Event()
        """Set once somebody trains, or this member cannot go on."""
        self.has_state = False
        self.reason = ""
        """Why this member left, where it did."""
        self._settings: LocalSettings = run.manifest.local
        self._service = service
        self._me = service.signer.peer
        self._holders = list(dict.fromkeys([*holders, run.requester]))
        self._tell = tell
        self._life = trio.CancelScope()
        self._part: Participation | None = None
        self._trainer: LocalTrainer | None = None
        self._rounds: Rounds | None = None
        self._evaluated_step = 0
        self._due_since: dict[str, float] = {}
        self._diverged = 0
        self._declined: dict[PeerId, float] = {}
        self._graph: Graph | None = None
        self._fetching = trio.CancelScope()
        self._result_lock = trio.Lock()
        self._first_loss = inf
        """The held-out loss of the values that all began with."""
        self._keeper = Keeper(service, run)
        self._is_waiting = False
        """Whether the run is over for this member, which waits for the others."""

    # What is known

    @property
    def others(self) -> tuple[PeerId, ...]:
        """The other members in sight."""
        return () if self._part is None else tuple(self._part.roster.reports)

    @property
    def _training_others(self) -> list[PeerId]:
        reports = {} if self._part is None else self._part.roster.reports
        return [peer for peer, report in reports.items() if report.has_state]

    @property
    def step(self) -> int:
        """Local steps made here."""
        return 0 if self._trainer is None else self._trainer.step

    @property
    def _is_at_end(self) -> bool:
        """Whether the steps are done: by most of the members, or here and by half of all, for one member may
        claim any step."""
        steps = self.run.manifest.steps
        reports = () if self._part is None else self._part.roster.reports.values()
        others = [report.step >= steps for report in reports if report.has_state]
        count, done = len(others) + 1, sum(others)
        return 2 * done > count or (self.step >= steps and 2 * (done + 1) >= count)

    # Life

    async def live(self) -> bool:
        """Take part until the run is over here, or this node cannot go on (`reason`); whether others take
        part."""
        had_others = False
        with trio.CancelScope() as self._life:
            try:
                await self._take_part()
            except StageFailed as error:
                self.reason = str(error)
            except Unreachable as error:
                self.reason = error.detail
            except (UsageError, OSError) as error:
                self.reason = str(error)
            had_others = bool(self._training_others)
        with trio.CancelScope(shield=True):
            await self._close()
        self.begun.set()
        return had_others

    def cancel(self) -> None:
        """Take no further part."""
        self.is_over = True
        self._life.cancel()

    async def _close(self) -> None:
        self.has_state = False
        if self._part is not None:
            self._part.close()
            self._part = None
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            await trainer.stage.aclose()

    async def _take_part(self) -> None:
        service, manifest = self._service, self.run.manifest
        graph = self._graph = await service.models.get(manifest.graph_hash, self._holders)
        plan = whole_plan(self.run, graph, self._me)
        try:
            build = partial(build_stage_spec, self.run, graph, plan, 0, service.machine)
            specification, _, data = await service.seams.executor.run(build, apart=True)
        except RemoteProtocolError as error:
            raise StageFailed(f"no stage can be made of this model: {error}") from None
        if self.is_training:
            await self._open(graph, specification, data)
        # The run's id names the model too, and how it is trained.
        signature = signature_of(f"run in local mode {self.run.id.hex()}", ())
        part = self._part = service.averaging.open(f"run:{self.run.text}", signature, self._door)
        self._say(RunChanged(at=self._wall, run=self.run.text, state="running", reason=""))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look)
            nursery.start_soon(self._recruit)
            if self._trainer is not None:
                await part.settle(SETTLE_SECONDS)
                await self._train(self._trainer, nursery)
            await trio.sleep_forever()

    async def _open(self, graph: Graph, specification: StageSpecification, data: bytes) -> None:
        service, manifest = self._service, self.run.manifest
        dataset = await service.load_data(self.run, self._holders)
        if not fits(dataset, manifest, graph):
            raise StageFailed("the data this node has does not fit the run's manifest; has it changed?")
        opened = await service.seams.executor.open_stage(data)
        try:
            await service.models.fill(opened, specification, self._holders)
            batches = make_batches(dataset, manifest, graph)
        except BaseException:
            await opened.aclose()
            raise
        executor = service.seams.executor
        self._trainer = LocalTrainer(self.run, specification, opened, batches, executor, self._me)

    # Training

    async def _train(self, trainer: LocalTrainer, nursery: trio.Nursery) -> None:
        assert self._part is not None
        rounds = self._rounds = Rounds(self._me, self._settings, trainer, self._part)
        await rounds.open()
        self._first_loss = await self._held_out_loss(trainer)
        await self._begin(trainer, rounds)
        self.has_state = True
        self.begun.set()
        self._evaluated_step = trainer.step
        while True:
            self._report()
            await self._between_steps(trainer, rounds, nursery)
            if self._is_waiting or self._is_at_end or trainer.step >= self.run.manifest.steps:
                await trio.sleep(LOOK_SECONDS)  # the end is being agreed on
                continue
            begun = trio.current_time()
            self._show(await trainer.train_step(), trio.current_time() - begun)
            if self._diverged >= DIVERGED_MAX:
                await self._recover(f"{DIVERGED_MAX} steps in a row were not finite")

    async def _begin(self, trainer: LocalTrainer, rounds: Rounds) -> None:
        """Go on from the state of the others, or from the own last one where nobody is further."""
        own = await self._keeper.load(trainer.state_bytes_max)
        others = [report.step for report in self._part.roster.reports.values() if report.has_state]  # type: ignore[union-attr]  # it is open
        if own is not None and own.table.step >= min(max(others, default=0), self._step_likely):
            with suppress(ValueError):
                rounds.take_over(own.table.rounds, await trainer.take_over(own))
                self._keeper.begin(trainer.step)
                return
        if others:
            await self._catch_up()

    async def _keep(self, trainer: LocalTrainer, rounds: Rounds, nursery: trio.Nursery) -> None:
        """Put the state away, and who takes part."""
        self._keeper.begin(trainer.step)
        peers = tuple(self.admission.admitted)[-MEMBERS_MAX:]
        saved = SavedRun(self.run.fact, self.admission.chain, self.is_training, peers)
        snapshot = await trainer.snapshot(rounds.count, self.run.id, rounds.outer)
        nursery.start_soon(self._keeper.remember, saved)
        nursery.start_soon(self._keeper.save, snapshot)

    async def _between_steps(self, trainer: LocalTrainer, rounds: Rounds, nursery: trio.Nursery) -> None:
        """Use a round that is over, begin the next, hand on the state, evaluate."""
        assert self._part is not None
        made = await rounds.use()
        if made is not None and made.error and self._is_behind(rounds):
            await self._catch_up()
        if self._is_waiting:
            pass  # what is proposed does not change any more
        elif rounds.is_due and self._training_others:
            await rounds.begin(nursery)
        elif rounds.is_due:
            rounds.skip()
        if self._part.is_state_wanted:
            lineage = self.run.id
            self._part.offer(await trainer.snapshot(rounds.count, lineage, rounds.outer))
        if self._keeper.is_due(trainer.step) and not self._diverged:
            await self._keep(trainer, rounds, nursery)
        await self._evaluate_if_due(trainer)
        await self._judge(trainer)

    async def _held_out_loss(self, trainer: LocalTrainer) -> float:
        """Return the held-out loss of the numbers that this member has now; inf where it is none."""
        try:
            loss, _, _ = await trainer.evaluate()
        except StageDiverged:
            return inf
        return loss if isfinite(loss) else inf

    def _is_behind(self, rounds: Rounds) -> bool:
        """Whether others held a round that this member had to be in."""
        assert self._part is not None
        others = [report.rounds for report in self._part.roster.reports.values() if report.has_state]
        return rounds.needs_all and max(others, default=0) > rounds.count

    async def _catch_up(self) -> None:
        """Take over the state of those that are furthest. Raises StageFailed: nobody hands one over."""
        assert self._part is not None
        assert self._trainer is not None
        assert self._rounds is not None
        reason, trainer = "", self._trainer
        useless: set[PeerId] = set()
        first = None if self.has_state else await trainer.copy_out(moments=True)
        for _ in range(CATCH_UPS_MAX):
            if not set(self._training_others) - useless:
                break  # nobody is left that was further
            try:
                found = await self._part.fetch(
                    0,
                    self.run.manifest.steps,
                    bytes_max=trainer.state_bytes_max,
                    passed_over=useless,
                    step_likely=self._step_likely,
                )
                outer = await trainer.take_over(found)
                if first is not None and not is_usable(self._first_loss, await self._held_out_loss(trainer)):
                    useless.update(found.holders)
                    raise ValueError("the state of others is worse than none")
                self._rounds.take_over(found.table.rounds, outer)
            except Unreachable as error:
                reason = error.detail
            except ValueError as error:
                reason = str(error)
            else:
                self._diverged = 0
                return
            await trio.sleep(1.0)
        else:
            raise StageFailed(f"no member handed over its state: {reason}")
        if useless and first is not None:
            await trainer.begin_again(first)

    @property
    def _step_likely(self) -> int:
        """How far the others may well be: the lower half of them, and some rounds more. One alone may claim
        any step."""
        assert self._part is not None
        steps = sorted(report.step for report in self._part.roster.reports.values() if report.has_state)
        middle = steps[(len(steps) - 1) // 2] if steps else 0
        return middle + LIKELY_ROUNDS * self._settings.local_steps

    async def _recover(self, reason: str) -> None:
        """The numbers here are not finite any more: take those of others, or end."""
        if self._training_others:
            await self._catch_up()
        elif self.ending.best is None:
            self._propose(Conclusion(self.run.id, "failed", reason, self.step, "", self._me))

    # Evaluations and the end

    async def _evaluate_if_due(self, trainer: LocalTrainer) -> None:
        if self.ending.best is not None:
            return
        self._is_waiting = False
        apart = self._apart
        is_last = self._is_at_end
        waited = max(
            self._waited("an end", is_last or self.ending.has_converged),
            self._waited("an evaluation", trainer.step - self._evaluated_step >= apart),
        )
        self._tell(self.ending, lambda now: self.ending.set_due(now, waited))
        if waited < 0 or not self.ending.evaluates(self._training_others, waited):
            return
        if not await self._evaluate(trainer):
            return
        if is_last or self.ending.has_converged:
            await self._conclude(trainer, "" if is_last else "its evaluations stopped improving")

    @property
    def _apart(self) -> int:
        """Steps between two evaluations."""
        return self._settings.evaluate_every * self._settings.local_steps

    def _waited(self, what: str, is_due: bool) -> float:
        """Return for how long something has been due, in seconds; -1 where it is not."""
        if not is_due:
            self._due_since.pop(what, None)
            return -1.0
        now = trio.current_time()
        return now - self._due_since.setdefault(what, now)

    async def _evaluate(self, trainer: LocalTrainer) -> bool:
        """Evaluate, and tell all; whether the loss is a number."""
        try:
            loss, samples, metrics = await trainer.evaluate()
        except StageDiverged:
            loss, samples, metrics = inf, 0, ()
        if not isfinite(loss):
            await self._recover("the held-out loss is not finite")
            return False
        self._evaluated_step = trainer.step
        step, ending = trainer.step, self.ending
        self._tell(ending, lambda _: ending.evaluate(step, samples, loss, metrics))
        self._show_evaluation(samples, loss, metrics)
        return True

    def evaluation_heard(self, heard: Evaluated) -> None:
        """Another member has evaluated: the next one is due as long after that here too."""
        self._evaluated_step = self.step
        if len(heard.metrics) == len(self.run.manifest.metrics):
            self._show_evaluation(heard.samples, heard.loss, heard.metrics)

    def _show_evaluation(self, samples: int, loss: float, metrics: tuple[float, ...]) -> None:
        named = dict(zip(self.run.manifest.metrics, metrics, strict=True))
        accuracy = named[CORRECT] / samples if CORRECT in named and samples else None
        event = RunEvaluated(
            at=self._wall, run=self.run.text, accuracy=accuracy, loss=loss, samples=samples, metrics=metrics
        )
        self.shown.evaluated = event
        self._say(event)

    async def _conclude(self, trainer: LocalTrainer, reason: str) -> None:
        """Keep the model and propose it as the result."""
        assert self._graph is not None
        storage, work = self._service.seams.storage, self._service.seams.executor.run
        exported = await trainer.export()
        data = await work(partial(join_stages, self.run, self._graph, [exported]))
        async with self._result_lock:
            if self.ending.best is not None:
                return  # another conclusion came meanwhile, whose result is to lie here
            await work(partial(storage.delete, weights_name(self.run.text)))  # of one that was given up
            digest = await work(partial(keep, storage, self.run.text, data))
            self._propose(Conclusion(self.run.id, "done", reason, trainer.step, digest, self._me))

    def _propose(self, conclusion: Conclusion) -> None:
        self._is_waiting = True
        self._tell(self.ending, lambda now: self.ending.propose(now, conclusion))

    async def fetch(self, conclusion: Conclusion) -> None:
        """Have the result of this conclusion here, then hold it. One fetch at a time: a slow one of a
        conclusion that was given up must not write over the result that is settled on."""
        self._fetching.cancel()
        async with self._result_lock:
            with trio.CancelScope() as self._fetching:
                await self._fetch(conclusion)

    async def _fetch(self, conclusion: Conclusion) -> None:
        service, ending, work = self._service, self.ending, self._service.seams.executor.run
        begun, attempts = trio.current_time(), 0
        while conclusion == ending.best and not ending.holds and not self.is_over:
            reason = ""
            if conclusion.outcome == "done":
                # What was kept for a conclusion that is given up must not stay in its place.
                await work(partial(service.seams.storage.delete, weights_name(self.run.text)))
                for holder in ending.holders:
                    reason = await fetch_result(service, self.run, holder, conclusion.weights)  # type: ignore[arg-type]  # of a smaller shape
                    if not reason:
                        break
                else:
                    reason = reason or "no member that has the result is left"
            self.reason = reason
            if not reason and (self.is_training or self._is_held_by_most):
                if self.is_training and conclusion.weights:
                    self._tell(ending, lambda _: ending.fetched(conclusion))
                else:
                    self._tell(ending, lambda now: ending.hold(now, conclusion))
                return
            attempts += 1
            if attempts >= FETCHES_MIN and trio.current_time() - begun >= FETCH_SECONDS:
                self._tell(ending, lambda _: ending.give_up(conclusion))
            await trio.sleep(1.0)

    @property
    def _is_held_by_most(self) -> bool:
        """Whether half of those that train hold the preferred conclusion: a member that does not train has
        their word alone."""
        return 2 * len(self.ending.holders) >= len(self._training_others)

    async def _judge(self, trainer: LocalTrainer) -> None:
        """Hold the result that another proposed, once the run may be over and it is as good as it should be;
        pass it over where it is not. Until then training goes on."""
        ending, conclusion = self.ending, self.ending.best
        if conclusion is None or ending.holds or not ending.is_here:
            return
        is_at_end, patience = self._is_at_end, self._settings.patience
        if not is_at_end and (not patience or trainer.step < patience * self._apart):
            return
        async with self._result_lock:
            if conclusion != ending.best:
                return
            name, storage = weights_name(self.run.text), self._service.seams.storage
            own, result = await self._held_out_loss(trainer), await trainer.evaluate_result(name, storage)
        losses = Losses(self._first_loss, own, result)
        best, improvement = ending.progress.best, self._settings.improvement
        fault = fault_of(losses, best, improvement, is_at_end=is_at_end)
        self._is_waiting = not fault
        if fault:
            self._say(RunChanged(at=self._wall, run=self.run.text, state="running", reason=_refused(fault)))
            self._tell(ending, lambda _: ending.give_up(conclusion))
        else:
            self._tell(ending, lambda now: ending.hold(now, conclusion))

    # Others

    @property
    def admission(self) -> Admission:
        """Who is a member, as far as this one knows."""
        return self._door.admission

    def admitted(self, peer: PeerId) -> None:
        """A peer has shown that it is a member."""
        if self._part is not None and peer in self._part.roster.claims:
            self._part.entered(peer)

    async def _look(self) -> None:
        """Follow who takes part."""
        while True:
            others, training = self.others, self._training_others
            if training:
                self.begun.set()
            self.ending.can_go_on = self.has_state and not self._diverged
            if self._trainer is not None:
                self._trainer.shard.set_members([self._me, *training])
            trainers = None if self._trainer is None else [*training, *([self._me] * self.has_state)]
            self._tell(self.ending, partial(self.ending.set_peers, peers=others, trainers=trainers))
            if self._part is not None:
                self._door.show(self._part.roster.claims)
            await trio.sleep(LOOK_SECONDS)

    async def _recruit(self) -> None:
        """As the first of the members, ask nodes with a free slot to take part."""
        while True:
            for peer in self._candidates():
                self._declined[peer] = trio.current_time() + DECLINED_SECONDS
                chain = self._door.chain_for(peer)
                if chain is None:
                    continue
                with suppress(Unreachable):
                    answer = await self._service.ask(peer, Join(self.run.fact, chain), JOIN_SECONDS_MAX)
                    if not isinstance(answer, Done):
                        continue
            await trio.sleep(RECRUIT_SECONDS)

    def _candidates(self) -> list[PeerId]:
        """The nodes to ask now."""
        others = self.others
        is_first = self.ending.is_evaluator(others) or not self._training_others
        if not is_first or self.ending.best is not None:
            return []
        now = trio.current_time()
        known = {self._me, *others}
        wanted = self.run.manifest.replicas
        missing = (wanted - len(known) + (not self.is_training)) if wanted else len(self._service.offers())
        free = [offer.peer for offer in self._service.offers() if offer.has_slot and offer.peer not in known]
        return [peer for peer in free if self._declined.get(peer, 0.0) <= now][: max(0, missing)]

    # What is said

    @property
    def _wall(self) -> float:
        return self._service.seams.clock.wall()

    def _say(self, event: RunChanged | RunEvaluated | StepCommitted) -> None:
        self._service.publish(event)

    def _report(self) -> None:
        """Tell the others how far this member is."""
        trainer, rounds = self._trainer, self._rounds
        if self._part is not None and trainer is not None and rounds is not None:
            self._part.tell(
                step=trainer.step,
                samples=trainer.samples,
                rounds=rounds.count,
                lineage=self.run.id,
                has_state=self.has_state,
            )

    def _show(self, stepped: Stepped, seconds: float) -> None:
        """Tell of a step here."""
        self._diverged = self._diverged + 1 if stepped.diverged else 0
        event = StepCommitted(
            at=self._wall,
            run=self.run.text,
            step=self.step - 1,
            loss=stepped.loss,
            samples=stepped.samples,
            seconds=seconds,
            replicas=1 + len(self._training_others),
            diverged=stepped.diverged[:REASON_LENGTH_MAX],
        )
        self.shown.committed = event
        if self.step % TOLD_STEPS == 1 or stepped.diverged or self.step == self.run.manifest.steps:
            self._say(event)
