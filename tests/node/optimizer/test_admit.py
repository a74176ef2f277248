"""Admission of participants to a named averaging run. Real nodes in threads of this process."""

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import pytest
import torch

from crypto.identity import PeerId, parse_peer
from node.averaging.door import TicketGate
from node.averaging.rounds import RoundWish
from node.averaging.service import Averaging
from node.averaging.signature import owned_run_key
from node.averaging.transfer import NoState
from node.errors import UsageError
from node.library.sync import SyncNode
from node.optimizer.open import choose_rule
from partition.run.admission import Admission
from tests.hostile.participant import LyingParticipant
from tests.log_lines import heard_log
from tests.node.optimizer.test_liars import Trainer
from tests.node.optimizer.test_wrapper import adamw, model_of, open_nodes, together, until
from tests.source import ROOT

torch.set_num_threads(1)
NAMES = (f"admit-{number}" for number in itertools.count())
OPTIONS = {"target_batch_size": 64, "window_seconds": 0.2}
ADMIT = "invited"
SOON_HOURS = 5.0 / 3600


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[SyncNode]]:
    with ExitStack() as stack:
        yield open_nodes(stack, tmp_path_factory.mktemp("admit"), 3)


@pytest.fixture
def begin() -> Iterator[Callable[..., Trainer]]:
    """Have a node train until the test is over."""
    made: list[Trainer] = []

    def start(me: SyncNode, name: str, **options: Any) -> Trainer:
        made.append(Trainer(me, len(made), name, {**OPTIONS, **options}))
        made[-1].begin()
        return made[-1]

    yield start
    for each in made:
        each.end()
    for each in made:
        each.close()


class Uninvited(LyingParticipant):
    """A peer that knows the run's name, owner and tensors, and that admits every peer on its own
    authority."""

    def __init__(self, me: SyncNode, run_id: str, owner: PeerId, monkeypatch: pytest.MonkeyPatch) -> None:
        class Ajar(TicketGate):
            def admits(self, peer: PeerId) -> bool:
                return True

        node = me._portal.subject
        admission = Admission(node.signer, owned_run_key(run_id, owner), owner, ())
        door = Ajar(admission, node.seams.swarm_clock, lambda _: None)
        enter = Averaging.open

        def open_door(self: Averaging, name: str, signature: bytes, _: None, rule: str) -> object:
            return enter(self, name, signature, None, rule, door=door)  # type: ignore[arg-type]  # a rule

        with monkeypatch.context() as patched:
            patched.setattr(Averaging, "open", open_door)
            patched.setattr("tests.hostile.participant.choose_rule", lambda _, **__: "mean")
            super().__init__(me, adamw(model_of(9)), run_id, value=30.0, admit=ADMIT, **OPTIONS)


def test_an_uninvited_peer_takes_part_in_nothing(
    nodes: list[SyncNode], begin: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, c = nodes
    name = next(NAMES)
    first = begin(a, name, admit=ADMIT)
    stranger = Uninvited(c, name, parse_peer(a.id), monkeypatch)
    stranger.claim(2**20, samples=64)
    (run,) = [each for each in a._portal.subject.averaging.runs if each.name == name]
    until(lambda: parse_peer(c.id) in run.roster.claims)
    second = begin(b, name, admit=ADMIT, invitation=a.invite(name, b.id))
    until(lambda: second.optimizer.stats.rounds >= 2)
    assert isinstance(stranger.ask_for_state(parse_peer(a.id), 0), NoState)
    made = stranger._portal.run(
        stranger.run.average,
        np.zeros(4, np.float32),
        1.0,
        RoundWish(window_seconds=0.2, patience_seconds=0.5),
    )
    assert not made.is_averaged
    for each in (first, second):
        assert each.optimizer.stats.peers == 1
        assert each.optimizer.global_step < 2**20
        last = each.optimizer.stats.last_round
        assert last is not None
        assert set(last.shares) == {parse_peer(a.id), parse_peer(b.id)}
        assert last.aggregate == "mean"
    stranger.close()


def test_a_revoked_member_and_the_peers_it_invited_leave(
    nodes: list[SyncNode], begin: Callable[..., Trainer]
) -> None:
    a, b, c = nodes
    name = next(NAMES)
    invitation = a.invite(name, b.id, admit="vouched")
    first = begin(a, name, admit="vouched")
    second = begin(b, name, admit="vouched", invitation=invitation)
    third = begin(c, name, admit="vouched", invitation=b.invite(name, c.id))
    members = (first, second, third)
    until(lambda: all(each.optimizer.stats.peers == 2 for each in members))
    until(lambda: third.optimizer.stats.rounds > 0)
    with pytest.raises(UsageError, match="only its owner"):
        b.revoke(name, c.id)
    assert a.revoke(name, b.id) == 1
    until(lambda: all("revoked" in each.optimizer.status for each in (second, third)))
    until(lambda: first.optimizer.stats.peers == 0)
    steps = [each.optimizer.global_step for each in members]
    until(lambda: all(m.optimizer.global_step > s + 2 for m, s in zip(members, steps, strict=True)))
    with pytest.raises(UsageError, match="was revoked"):
        b.optimizer(adamw(model_of()), name, target_batch_size=64, admit="vouched", invitation=invitation)
    # The owner invites the member again, for a short time.
    again = a.invite(name, b.id, hours=SOON_HOURS)
    second.close()
    fourth = begin(b, name, admit="vouched", invitation=again)
    until(lambda: first.optimizer.stats.peers == 1)
    until(lambda: "expired" in fourth.optimizer.status)
    until(lambda: first.optimizer.stats.peers == 0)


def test_arrays_are_averaged_with_invited_peers_only(nodes: list[SyncNode]) -> None:
    a, b, c = nodes
    name = next(NAMES)
    tensors = {"w": np.ones(3, np.float32)}

    def average(me: SyncNode, invitation: str, value: float, seconds: float = 20.0) -> object:
        given = {"w": value * tensors["w"]}
        return me.average(given, name, admit=ADMIT, invitation=invitation, timeout_seconds=seconds)

    means = together(
        lambda: average(a, "", 1.0),
        lambda: average(b, a.invite(name, b.id), 2.0),
        lambda: average(c, "", 9.0, 1.0),
    )
    assert [each.is_averaged for each in means] == [True, True, False]
    assert means[0].tensors["w"].tolist() == [1.5] * 3
    assert set(means[1].shares) == {a.id, b.id}


def test_an_argument_that_contradicts_an_invitation_is_refused(nodes: list[SyncNode]) -> None:
    a, b, c = nodes
    name = next(NAMES)
    invitation = a.invite(name, b.id)
    late = a.invite(name, b.id, hours=1e-9)

    def enter(me: SyncNode, run: str, admit: str, text: str) -> None:
        with suppress(TypeError):
            me.optimizer(adamw(model_of()), run, target_batch_size=8, admit=admit, invitation=text)

    for me, run, admit, text, said in (
        (b, name, "open", invitation, 'requires admit="invited" or'),
        (b, name, "vouched", invitation, "admit='invited', not 'vouched'"),
        (b, name, "friends", "", "want one of open, invited, vouched"),
        (b, name, ADMIT, "hello", "not an invitation"),
        (b, next(NAMES), ADMIT, invitation, "does not fit"),
        (c, name, ADMIT, invitation, "does not fit"),
        (b, name, ADMIT, late, "expired"),
    ):
        with pytest.raises(UsageError, match=said):
            enter(me, run, admit, text)


def test_the_command_line_invites_and_revokes_a_peer(
    nodes: list[SyncNode],
    begin: Callable[..., Trainer],
) -> None:
    a, b, _ = nodes
    name = next(NAMES)

    def told(*words: str) -> str:
        folder = str(a._portal.subject.config.data_dir)
        command = [sys.executable, "-m", "node", "runs", *words, "--data-dir", folder]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
        return done.stdout + done.stderr

    first = begin(a, name, admit=ADMIT)
    second = begin(b, name, admit=ADMIT, invitation=told("invite", name, "n1").strip())
    until(lambda: second.optimizer.stats.rounds > 0)
    assert "may take no part" in told("revoke", name, "n1")
    until(lambda: "revoked" in second.optimizer.status)
    until(lambda: first.optimizer.stats.peers == 0)
    with pytest.raises(UsageError, match="not a peer id"):
        a.revoke(name, "nobody")


def test_an_open_run_warns_at_the_start_that_any_peer_may_join(
    nodes: list[SyncNode],
) -> None:
    me, name = nodes[0], next(NAMES)
    with heard_log() as lines:
        optimizer = me.optimizer(adamw(model_of()), name, target_batch_size=8, join_seconds=0.0)
        optimizer.close()
    (line,) = [each for each in lines if name in each]
    assert "anybody who knows the run's name takes part" in line
    assert "nnm-trimmed-mean" in line
    assert next(run for run in me.status()["averaging"] if run["run"] == name)["admit"] == "open"


def test_a_run_with_invitations_averages_by_mean() -> None:
    from node.optimizer.settings import Settings

    settings = Settings("r", target_batch_size=8, admit=ADMIT)
    assert choose_rule(settings, is_private=settings.admit != "open") == "mean"
