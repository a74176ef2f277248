"""The checkers of plans, steps, averages, records and limits accept valid hand-made event streams, and raise
for invalid ones."""

import pytest

from crypto.identity import PeerId
from dht.events import RecordsFound
from dht.keys import Key, record_key
from dht.records import Record, check_record, sign_record
from partition.plan.plan import NO_HASH
from sim.checkers import Checkers, checkers_for
from sim.checkers.averages import AveragesAgree
from sim.checkers.limits import WithinLimits
from sim.checkers.plans import OnePlanAHeight, PlansFollow
from sim.checkers.records import RecordsAreFound, RecordsAreGenuine
from sim.checkers.steps import SamplesOnce, SumsAgree
from sim.events import Averaged, PlanAdopted, RecordGot, RecordPublished, SamplesCounted, StepCommitted
from sim.observers import Broken
from sim.scenario import Checks, RecordsScenario, Scenario, TrainingScenario
from sim.seeds import HashSigner
from tests.sim.checkers.worlds import N0, N1, N2, N3, PEERS, Stage, a_scenario

RUN = bytes(31) + b"\1"
PLANS = [bytes(31) + bytes([16 * number + 1]) for number in range(9)]
KEY = record_key("test", b"key")
RECORDS = a_scenario(records=RecordsScenario(republish_seconds=10.0))
Rows = tuple[tuple[PeerId, tuple[int, ...]], ...]


def adopted(height: int, plan: bytes, parent: bytes) -> PlanAdopted:
    return PlanAdopted(RUN, height, plan, parent)


def committed(step: int, *stages: Rows, plan: int = 0) -> StepCommitted:
    return StepCommitted(RUN, PLANS[plan], plan, step, stages, 1.0)


def chain(stage: Stage, plans: int) -> None:
    for height in range(plans):
        parent = PLANS[height - 1] if height else NO_HASH
        for peer in (N0, N1):
            stage.tell(peer, adopted(height, PLANS[height], parent))


# Plans.


def test_a_chain_of_plans_is_accepted() -> None:
    for checker in (OnePlanAHeight(), PlansFollow()):
        chain(Stage(checker), 5)


def test_two_plans_at_one_height_are_reported() -> None:
    stage = Stage(OnePlanAHeight())
    chain(stage, 2)
    with pytest.raises(Broken, match=r"plans: two plans at height 1 of run 00000000: 0+ at n0, 0+ at n3"):
        stage.tell(N3, adopted(1, PLANS[7], PLANS[0]))


@pytest.mark.parametrize(
    ("event", "what"),
    [
        (adopted(2, PLANS[2], PLANS[7]), "which was never in force"),
        (adopted(2, PLANS[2], PLANS[0]), "of height 0"),
        (adopted(0, PLANS[2], PLANS[1]), "must have a parent, or be the first plan"),
        (adopted(2, PLANS[2], NO_HASH), "must have a parent"),
        (adopted(2, PLANS[1], PLANS[0]), "had height 1 or a different parent"),
    ],
)
def test_a_plan_that_does_not_follow_its_parent_is_reported(event: PlanAdopted, what: str) -> None:
    stage = Stage(PlansFollow())
    chain(stage, 2)
    with pytest.raises(Broken, match=rf"chain: .* at n2 .*{what}"):
        stage.tell(N2, event)


# Steps.


def test_steps_that_count_each_microbatch_once_are_accepted_even_after_checkpoints() -> None:
    stage = Stage(SamplesOnce())
    chain(stage, 2)
    for step in range(4):
        numbers = (2 * step, 2 * step + 1)
        stage.tell(N0, committed(step, ((N1, numbers[:1]), (N2, numbers[1:])), ((N3, numbers),)))
    # The next plan goes back to step 2, and counts the micro-batches of the later steps again.
    stage.tell(N0, committed(2, ((N1, (4, 5)),), ((N3, (5, 4)),), plan=1))
    stage.tell(N0, committed(3, ((N1, (6, 7)),), ((N3, (6, 7)),), plan=1))


@pytest.mark.parametrize(
    ("event", "what"),
    [
        (committed(1, ((N1, (2, 3)), (N2, (3,)))), "counts micro-batch 3 twice in stage 1: n1 and n2"),
        (committed(1, ((N1, (2, 3, 2)),)), "counts micro-batch 2 twice in stage 1: n1 and n1"),
        (
            committed(1, ((N1, (2, 3)),), ((N2, (2,)),)),
            "counts micro-batch 3 in only one of the stages 1 and 2",
        ),
        (committed(1, ((N1, (1, 2)),)), "micro-batch 1 is in step 0 and in step 1"),
        (committed(1, ((N1, (1, 2)),), plan=1), "micro-batch 1 is in step 0 and in step 1"),
    ],
)
def test_a_step_that_counts_a_microbatch_twice_is_reported(event: StepCommitted, what: str) -> None:
    stage = Stage(SamplesOnce())
    chain(stage, 2)
    stage.tell(N0, committed(0, ((N1, (0, 1)),)))
    with pytest.raises(Broken, match=f"samples: .*{what}"):
        stage.tell(N0, event)


def test_branches_of_a_fork_may_count_the_same_microbatch() -> None:
    stage = Stage(SamplesOnce())
    stage.tell(N0, adopted(0, PLANS[0], NO_HASH))
    stage.tell(N0, adopted(1, PLANS[1], PLANS[0]))
    stage.tell(N3, adopted(1, PLANS[2], PLANS[0]))
    stage.tell(N0, committed(0, ((N1, (0, 1)),)))
    stage.tell(N0, committed(1, ((N1, (2, 3)),), plan=1))
    stage.tell(N3, committed(1, ((N1, (2, 3)),), plan=2))
    with pytest.raises(Broken, match="micro-batch 0 is in step 0 and in step 2"):
        stage.tell(N3, committed(2, ((N1, (0,)),), plan=2))


def test_sums_that_match_the_commit_are_accepted_in_any_order() -> None:
    stage = Stage(SumsAgree())
    stage.tell(N1, SamplesCounted(RUN, PLANS[0], 0, 0, (1, 0)))
    stage.tell(N0, committed(0, ((N1, (0, 1)), (N2, (2,)))))
    stage.tell(N2, SamplesCounted(RUN, PLANS[0], 0, 0, (2,)))
    # The next plan distributes the micro-batches anew, and a restarted peer has applied nothing.
    stage.tell(N2, SamplesCounted(RUN, PLANS[1], 0, 0, (0, 2)))
    stage.stop(N2)
    stage.start(N2)
    stage.tell(N2, SamplesCounted(RUN, PLANS[0], 0, 0, (2,)))


@pytest.mark.parametrize(
    ("event", "what"),
    [
        (SamplesCounted(RUN, PLANS[0], 0, 0, (2, 2)), "n2 has micro-batch 2 twice in its sums of step 0"),
        (
            SamplesCounted(RUN, PLANS[0], 0, 0, (2, 3)),
            "n2 applies step 0 .* it was not assigned micro-batch 3",
        ),
        (SamplesCounted(RUN, PLANS[0], 0, 0, ()), "n2 applies step 0 .* its sums lack micro-batch 2"),
    ],
)
def test_sums_that_differ_from_the_commit_are_reported(event: SamplesCounted, what: str) -> None:
    stage = Stage(SumsAgree())
    stage.tell(N0, committed(0, ((N1, (0, 1)), (N2, (2,)))))
    with pytest.raises(Broken, match=f"sums: {what}"):
        stage.tell(N2, event)


def test_a_microbatch_summed_by_two_replicas_is_reported() -> None:
    stage = Stage(SumsAgree())
    stage.tell(N1, SamplesCounted(RUN, PLANS[0], 0, 0, (1, 2)))
    stage.tell(N3, SamplesCounted(RUN, PLANS[0], 0, 1, (2, 3)))
    with pytest.raises(Broken, match="sums: micro-batch 2 of step 0 is in the sums of n1 and of n2"):
        stage.tell(N2, SamplesCounted(RUN, PLANS[0], 0, 0, (2, 3)))


def test_a_step_applied_twice_is_reported() -> None:
    stage = Stage(SumsAgree())
    stage.tell(N2, SamplesCounted(RUN, PLANS[0], 0, 0, (2,)))
    with pytest.raises(Broken, match=r"n2 applies step 0 twice, first at 0.000 s"):
        stage.tell(N2, SamplesCounted(RUN, PLANS[0], 0, 0, (2,)))


# Averages.


def test_an_agreed_average_is_accepted_and_the_next_attempt_may_differ() -> None:
    stage = Stage(AveragesAgree())
    for attempt, entered in enumerate([(N0, N1, N2), (N0, N1)]):
        for peer in entered:
            stage.tell(peer, Averaged(b"round", attempt, entered, bytes([attempt])))


@pytest.mark.parametrize(
    ("event", "what"),
    [
        (Averaged(b"r", 1, (N0, N1, N3), b"sum"), "n0 and a second peer disagree about n2 in attempt 1"),
        (
            Averaged(b"r", 1, (N0, N1, N2), b"mus"),
            "n0 holds different bytes after attempt 1 .* reported by n1",
        ),
        (Averaged(b"r", 1, (N0, N2), b"sum"), "the reporting peer is not a member in attempt 1"),
        (Averaged(b"r", 1, (N0, N1, N1), b"sum"), "a member is named twice"),
        (Averaged(b"r", 2, (N0, N1, PEERS[9]), b"sum"), "n9 never ran, but is a member in attempt 2"),
    ],
)
def test_an_average_on_which_peers_disagree_is_reported(event: Averaged, what: str) -> None:
    stage = Stage(AveragesAgree())
    stage.tell(N0, Averaged(b"r", 1, (N0, N1, N2), b"sum"))
    with pytest.raises(Broken, match=f"averages: .*{what}"):
        stage.tell(N1, event)


# Records.


def a_record(author: PeerId, value: bytes, sequence: int, key: Key = KEY) -> Record:
    signer = HashSigner(author, "sim", 1)
    return check_record(signer, sign_record(signer, key, value, sequence=sequence, expires=9))


def test_finding_an_old_or_a_new_version_of_a_record_is_accepted() -> None:
    stage = Stage(RecordsAreGenuine())
    for sequence in (7, 8):
        stage.tell(N0, RecordPublished(KEY, b"value", sequence))
        stage.tell(N1, RecordsFound(1, KEY, (a_record(N0, b"value", 7),)))
    other = record_key("test", b"other")
    stage.tell(N1, RecordsFound(1, other, (a_record(N0, b"value", 9, other),)))


@pytest.mark.parametrize(
    "forged", [a_record(N0, b"eulav", 7), a_record(N0, b"value", 8), a_record(N3, b"value", 7)]
)
def test_a_forged_record_is_reported(forged: Record) -> None:
    stage = Stage(RecordsAreGenuine())
    stage.tell(N0, RecordPublished(KEY, b"value", 7))
    with pytest.raises(Broken, match=r"forged-record: n1 found a record of n\d under"):
        stage.tell(N1, RecordsFound(1, KEY, (a_record(N0, b"value", 7), forged)))


def looked(stage: Stage, times: int, *, copies: int, expected: bool = True, storing: bool = False) -> None:
    for _ in range(times):
        stage.tell(N0, RecordGot(1, storing, copies, expected, 0.1, 1))


def test_a_few_missed_records_are_accepted_and_many_reported_at_the_end() -> None:
    stage = Stage(RecordsAreFound(RECORDS))
    stage.now = 30.0
    looked(stage, 90, copies=1)
    looked(stage, 10, copies=0)
    looked(stage, 50, copies=0, expected=False)
    looked(stage, 50, copies=0, storing=True)
    stage.checker.end(stage)
    looked(stage, 1, copies=0)
    with pytest.raises(Broken, match="lost-records: 11 of 101 lookups missed an existing record"):
        stage.checker.end(stage)


def test_failed_lookups_before_the_first_republishing_are_ignored() -> None:
    stage = Stage(RecordsAreFound(RECORDS))
    stage.now = 29.0
    looked(stage, 50, copies=0)
    stage.checker.end(stage)


def test_a_high_rate_of_missed_records_is_reported_early() -> None:
    stage = Stage(RecordsAreFound(RECORDS))
    stage.now = 30.0
    looked(stage, 20, copies=0)
    with pytest.raises(Broken, match="lost-records: 21 of 21 lookups"):
        looked(stage, 1, copies=0)


# Limits, and the set of checkers.


def test_sizes_up_to_their_limits_are_accepted_and_larger_ones_reported() -> None:
    stage = Stage(WithinLimits())
    stage.held = {N2: {"queue": (5, 5), "members": (3, 9)}}
    stage.wait(3)
    stage.held[N2]["queue"] = (6, 5)
    with pytest.raises(Broken, match="limits: n2 has a size of 6 for queue; the limit is 5"):
        stage.wait(3)
    stage.stop(N2)
    stage.wait(3)
    stage.checker.end(stage)


def names(scenario: Scenario) -> set[str]:
    (watcher,) = checkers_for(scenario)
    assert isinstance(watcher, Checkers)
    return {checker.name for checker in watcher.checkers}


def test_a_scenario_checks_the_invariants_that_it_requests_or_may_break() -> None:
    always = {"limits", "refutation", "forged-record", "averages"}
    plain = Scenario(name="t", about="t")
    assert names(plain) == always
    asked = Scenario(
        name="t", about="t", checks=Checks(converge_seconds=9.0, false_deaths=True, found_share=0.9)
    )
    assert names(asked) == always | {"membership", "false-death", "lost-records"}
    steps = {"chain", "samples", "sums", "branches"}
    assert names(Scenario(name="t", about="t", runs=(TrainingScenario(),))) == always | steps | {"plans"}
    assert (
        names(Scenario(name="t", about="t", runs=(TrainingScenario(on_lost_quorum="fork"),)))
        == always | steps
    )


def test_all_checkers_of_a_scenario_share_one_watcher() -> None:
    (watcher,) = checkers_for(a_scenario(runs=(TrainingScenario(),)))
    assert isinstance(watcher, Checkers)
    stage = Stage(WithinLimits())
    stage.checker = watcher  # type: ignore[assignment]  # a watcher is all that it needs
    chain(stage, 2)
    stage.wait(3)
    with pytest.raises(Broken, match="plans: two plans"):
        stage.tell(N3, adopted(1, PLANS[7], PLANS[0]))
    with pytest.raises(Broken, match="samples: "):
        stage.tell(N0, committed(0, ((N1, (0, 0)),)))
