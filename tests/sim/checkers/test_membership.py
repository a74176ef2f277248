"""The checkers of membership accept valid hand-made event streams, and raise for invalid ones."""

import pytest

from gossip.member import MemberDown, MemberLeft, MemberUp, Status
from sim.checkers.membership import DeathsAreRefuted, NoFalseDeaths, ViewsConverge
from sim.checkers.quiet_period import QuietPeriods, detection_seconds, refutation_seconds
from sim.churn.model import ChurnEvent
from sim.events import PeerFrozen
from sim.observers import Broken
from tests.sim.checkers.worlds import N0, N1, N2, N3, PEERS, Stage, a_scenario

DETECTION = detection_seconds(a_scenario())
REFUTATION = refutation_seconds(a_scenario())
PARTITION = ChurnEvent(at_seconds=50.0, kind="partition", share=0.25, lasts_seconds=60.0)


def up(peer: bytes) -> MemberUp:
    return MemberUp(peer, "", (), b"", 1, N0)  # type: ignore[arg-type]  # a peer id is bytes


def test_correct_views_are_always_accepted() -> None:
    stage = Stage(ViewsConverge(a_scenario()))
    stage.wait(500)
    stage.checker.end(stage)


def test_a_late_listing_is_reported_with_the_names_of_both_peers() -> None:
    stage = Stage(ViewsConverge(a_scenario()))
    del stage.views[N2][N3]
    stage.wait(99)
    with pytest.raises(
        Broken, match=r"membership: n2 does not list n3, which has been up and reachable since 0.000"
    ):
        stage.wait(3)


def test_a_newcomer_has_time_to_be_listed_and_to_list_others() -> None:
    stage = Stage(ViewsConverge(a_scenario()))
    stage.wait(200)
    newcomer = PEERS[5]
    stage.start(newcomer)
    stage.wait(90)
    for view in stage.views.values():
        view[newcomer] = Status.ALIVE
    stage.views[newcomer] = dict.fromkeys((*PEERS[:4], newcomer), Status.SUSPECT)
    stage.wait(100)
    del stage.views[newcomer][N0]
    with pytest.raises(Broken, match="n5 does not list n0"):
        stage.wait(3)


def test_a_peer_that_stays_listed_long_after_its_death_is_reported() -> None:
    stage = Stage(ViewsConverge(a_scenario()))
    stage.wait(200)
    stage.stop(N3)
    for viewer in (N0, N1):
        stage.views[viewer][N3] = Status.DEAD
    stage.wait(99)
    with pytest.raises(Broken, match=r"n2 lists n3, which has been down since 200.000 s"):
        stage.wait(3)


def test_views_are_not_judged_during_and_shortly_after_a_partition() -> None:
    stage = Stage(ViewsConverge(a_scenario(events=(PARTITION,))))
    stage.views[N0][N3] = Status.DEAD
    stage.wait(209)
    with pytest.raises(Broken, match="n0 does not list n3"):
        stage.wait(4)


def test_peers_out_of_scope_or_reach_need_not_be_listed() -> None:
    stage = Stage(ViewsConverge(a_scenario()))
    stage.foreign = (N3,)
    stage.away = (N2,)
    for viewer in (N0, N1, N3):
        stage.views[viewer] = dict.fromkeys((N0, N1), Status.ALIVE)
    stage.views[N2] = {}
    stage.wait(300)
    stage.away = ()
    with pytest.raises(Broken, match="does not list"):
        stage.wait(3)


def test_a_goodbye_heard_before_the_peer_stopped_is_accepted() -> None:
    stage = Stage(ViewsConverge(a_scenario()))
    stage.wait(200)
    stage.tell(N0, MemberLeft(N3))
    for viewer in (N0, N1, N2):
        stage.views[viewer][N3] = Status.LEFT
    stage.wait(5)
    stage.stop(N3)
    stage.wait(300)


def test_each_check_samples_some_views_and_covers_all_in_turn() -> None:
    stage = Stage(ViewsConverge(a_scenario()), peers=12)
    stage.wait(100)
    for wrong in PEERS:
        stage.views[wrong].clear()
        with pytest.raises(Broken, match=stage.name(wrong)):
            stage.wait(3)
        stage.views[wrong] = dict.fromkeys(PEERS, Status.ALIVE)


def test_a_false_death_is_reported_and_a_real_one_is_accepted() -> None:
    stage = Stage(NoFalseDeaths(a_scenario()))
    stage.wait(DETECTION + 1)
    stage.stop(N2)
    stage.tell(N0, MemberDown(N2, N1, "no ack"))
    with pytest.raises(Broken, match=r"false-death: n0 declares n3 dead \(no ack\), which has been up"):
        stage.tell(N0, MemberDown(N3, N1, "no ack"))


def test_deaths_of_earlier_incarnations_and_across_splits_are_not_false() -> None:
    stage = Stage(NoFalseDeaths(a_scenario(events=(PARTITION,))))
    stage.wait(200)
    stage.stop(N2)
    stage.start(N2)
    stage.tell(N0, MemberDown(N2, N1, "no ack"))
    stage.away = (N3,)
    stage.tell(N0, MemberDown(N3, N1, "no ack"))
    stage.away = ()
    stage.tell(N1, PeerFrozen(30.0))
    stage.tell(N0, MemberDown(N1, N0, "no ack"))


def test_a_death_that_is_retracted_in_time_is_accepted() -> None:
    stage = Stage(DeathsAreRefuted(a_scenario()))
    stage.wait(10)
    stage.views[N0][N3] = Status.DEAD
    stage.tell(N0, MemberDown(N3, N1, "no ack"))
    stage.wait(REFUTATION - 2)
    stage.views[N0][N3] = Status.ALIVE
    stage.tell(N0, up(N3))
    stage.wait(10)
    # A second false death has a time limit of its own.
    stage.views[N0][N3] = Status.DEAD
    stage.tell(N0, MemberDown(N3, N1, "no ack"))
    stage.wait(REFUTATION - 2)


def test_a_member_that_does_not_refute_a_false_death_is_reported() -> None:
    stage = Stage(DeathsAreRefuted(a_scenario()))
    stage.wait(10)
    stage.views[N0][N3] = Status.DEAD
    stage.tell(N0, MemberDown(N3, N1, "no ack"))
    stage.wait(REFUTATION - 1)
    with pytest.raises(Broken, match=r"refutation: n0 has listed n3 as dead since 10.000 s, though"):
        stage.wait(2)


def test_a_split_or_a_restart_renews_the_time_to_refute() -> None:
    stage = Stage(DeathsAreRefuted(a_scenario()))
    stage.views[N0][N3] = Status.DEAD
    stage.tell(N0, MemberDown(N3, N1, "no ack"))
    stage.wait(REFUTATION - 10)
    stage.stop(N3)
    stage.start(N3)
    stage.wait(REFUTATION - 1)
    with pytest.raises(Broken, match="n0 has listed n3 as dead"):
        stage.wait(20)


def test_a_dead_peer_that_is_listed_as_dead_is_accepted() -> None:
    stage = Stage(DeathsAreRefuted(a_scenario()))
    stage.views[N0][N3] = Status.DEAD
    stage.tell(N0, MemberDown(N3, N1, "no ack"))
    stage.stop(N3)
    stage.wait(3 * REFUTATION)


def test_the_network_is_calm_between_repetitions_of_an_event() -> None:
    again = ChurnEvent(at_seconds=10.0, kind="loss", lasts_seconds=5.0, every_seconds=20.0)
    slow = ChurnEvent(at_seconds=0.0, kind="slow", lasts_seconds=500.0)
    calm = QuietPeriods(a_scenario(events=(again, slow)))
    assert [calm.network_since(now) for now in (5.0, 12.0, 16.0, 29.0, 31.0)] == [0.0, 15.0, 15.0, 15.0, 35.0]
