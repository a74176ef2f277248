"""Screens as text snapshots: exactly the text that a user sees."""

import io
import re
import time
from collections.abc import Iterator
from textwrap import dedent

import msgspec
import pytest
from msgspec.structs import replace

from crypto.identity import Identity, PeerId
from node import averaging_events, events, result_events
from node.cli.peers import peers_lines
from node.cli.render import error_lines, seconds_text, short_address, show
from node.cli.run_lines import rate_text
from node.cli.runs import runs_lines
from node.cli.screen import EventScreen
from node.cli.status import status_lines
from node.errors import UsageError
from node.event_kinds import EVENT_KINDS
from node.settings_events import NodeConfigured, RunGoalSet
from node.state import State, apply
from node.state_documents import event_document, peers_document, status_document
from tests.node.serving.told import page_opened, serving_events

NOW = 1_700_000_000.0


@pytest.fixture(autouse=True)
def _in_utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def peer(number: int) -> PeerId:
    return Identity(bytes([number]) * 32).peer


def capacity(at: float = NOW) -> events.CapacityMeasured:
    return events.CapacityMeasured(
        at=at,
        device="cpu",
        cores=2,
        memory_free_bytes=21_300_000_000,
        memory_total_bytes=24_000_000_000,
        flops_per_second=118e9,
        location="",
    )


STARTED = events.NodeStarted(
    at=NOW - 7380,
    peer=peer(1),
    name="lab-1",
    swarm="default",
    addresses=("/ip4/192.168.1.20/tcp/9747",),
    identity_is_new=True,
    data_dir="/data/lab-1",
    port_wanted=9747,
    port=9747,
    join_address="/ip4/192.168.1.20/tcp/9747",
)
HISTORY: list[events.Event] = [
    capacity(NOW - 7381),
    events.FencesTried(
        at=NOW - 7381, fences=("limits: some",), unfenced=("files: no landlock",), is_allowed=False
    ),
    STARTED,
    page_opened(NOW - 7380),
    result_events.RunRemembered(
        at=NOW - 7380,
        run="fedcba9876543210",
        model="gpt",
        data="digits",
        requester=peer(1),
        steps=100,
        step=100,
        loss=0.25,
        accuracy=None,
        outcome="done",
        detail="",
        weights="cd",
        is_here=True,
        ended_at=NOW - 90_000,
    ),
    result_events.ResultEvicted(at=NOW - 7380, run="fedcba9876543210"),
    result_events.ResultDiffers(at=NOW - 7380, run="fedcba9876543210", peer=peer(2), weights="ef" * 32),
    events.ReachabilityFound(
        at=NOW - 7380, reachable=False, asked=3, of=3, addresses=("/ip4/192.168.1.20/tcp/9747",)
    ),
    events.ReachabilityFound(
        at=NOW - 7380, reachable=True, asked=3, of=3, addresses=("/ip4/192.168.1.20/tcp/9747",)
    ),
    events.DatagramsBlocked(at=NOW - 7380, peers=(peer(1),), of=3),
    events.DatagramsBlocked(at=NOW - 7380, peers=(), of=3),
    events.IdentityShared(
        at=NOW - 7380, name="lab-1", addresses=("/ip4/10.0.0.9/tcp/9747",), started=NOW, is_younger=True
    ),
    events.ClockCompared(at=NOW - 7380, seconds=-7_200.0, peers=5),
    events.ClockCompared(at=NOW - 7380, seconds=0.0, peers=5),
    events.JoinTried(
        at=NOW - 7379,
        address="/dns/old-box/tcp/9747",
        outcome="refused",
        detail="10.0.0.6 is up, but no node listens on port 9747",
    ),
    events.JoinTried(
        at=NOW - 7370,
        address="/dns/old-box/tcp/9747",
        outcome="refused",
        detail="10.0.0.6 is up, but no node listens on port 9747",
    ),
    events.MemberJoined(
        at=NOW - 7000,
        peer=peer(2),
        name="lab-2",
        addresses=("/ip4/10.0.0.2/tcp/97",),
        found_through="join",
        capacity=capacity(),
    ),
    events.JoinTried(
        at=NOW - 7000,
        address="/ip4/10.0.0.2/tcp/97",
        outcome="ok",
        detail="",
        peer=peer(2),
        seconds=0.0012,
    ),
    events.MemberJoined(
        at=NOW - 6000,
        peer=peer(3),
        name="e\x1b[2J",
        addresses=("/ip6/::3/tcp/9747",),
        found_through="lab-2",
    ),
    events.MemberChanged(
        at=NOW - 5_000,
        peer=peer(2),
        name="lab-2",
        addresses=("/ip4/10.0.0.2/tcp/97",),
        capacity=capacity(),
        standing=events.Standing(
            capabilities=("stages", "fenced"),
            load_percent=50,
            memory_available_bytes=12_000_000_000,
            slots_free=0,
            stages=(("01234567", 0),),
        ),
    ),
    events.MemberDegraded(
        at=NOW - 4_000, peer=peer(3), condition="late", rate=0.375, seconds=0.62, reason="5 of 8 late"
    ),
    events.MemberDegraded(at=NOW - 3_990, peer=peer(3), condition=""),
    events.RunAccepted(
        at=NOW - 100, run="0123456789abcdef", model="simple-cnn", data="digits", steps=200, requester=peer(2)
    ),
    events.RunPlanned(
        at=NOW - 99,
        run="0123456789abcdef",
        plan="fedcba9876543210",
        height=0,
        trainer=peer(1),
        planner=peer(2),
        layers=((0, 3), (3, 4)),
        stages=((peer(1), peer(2)), (peer(3),)),
        trainers=(peer(1),),
        standbys=(peer(2),),
    ),
    events.RunCovered(
        at=NOW - 99, run="0123456789abcdef", covers=(0.99, 0.45), unreliable="lab-3 was lost once"
    ),
    events.StageDegraded(
        at=NOW - 99,
        run="0123456789abcdef",
        stage=1,
        peer=peer(3),
        rate=0.4,
        reason="computes at 40% of what was promised",
    ),
    events.StageLeased(at=NOW - 99, run="0123456789abcdef", stage=0, layers=(0, 3)),
    *(
        events.StepCommitted(
            at=NOW - 90 + step,
            run="0123456789abcdef",
            step=step,
            loss=2.3 / (step + 1),
            samples=128,
            seconds=0.5,
            replicas=3,
            utilisation=(0.9, 0.75),
            bubble=0.15,
            rounding=(0.006, 0.005),
        )
        for step in range(12)
    ),
    events.MemberSuspected(at=NOW - 60, peer=peer(3), by=peer(2)),
    events.MemberRefuted(at=NOW - 59, peer=peer(3)),
    events.MemberSuspected(at=NOW - 50, peer=peer(3), by=peer(2)),
    events.MemberLost(at=NOW - 42.0, peer=peer(3), reason="no ack"),
    events.ReplicaDropped(
        at=NOW - 42, run="0123456789abcdef", step=12, stage=1, peer=peer(3), microbatches_replayed=3
    ),
    events.RunChanged(at=NOW - 41, run="0123456789abcdef", state="degraded", reason="fewer replicas"),
    events.RunResumed(
        at=NOW - 41,
        run="0123456789abcdef",
        height=1,
        step=12,
        replayed=3,
        lost_steps=0,
        filled=(),
        seconds=1.25,
    ),
    events.CheckpointFailed(at=NOW - 40, run="0123456789abcdef", step=20, reason="this disk is full"),
    events.CheckpointKept(
        at=NOW - 40, run="0123456789abcdef", step=12, checkpoint="ab" * 32, copies=3, size_bytes=4_200_000
    ),
    events.RunEvaluated(at=NOW - 2, run="0123456789abcdef", accuracy=0.975, loss=0.1, samples=360),
    events.RunEnded(
        at=NOW - 1, run="0123456789abcdef", outcome="done", detail="", weights="ab", is_here=True
    ),
    events.OfferChanged(at=NOW - 2, may_serve=False, reason="on battery"),
    RunGoalSet(at=NOW - 2, run="0123456789abcdef", samples_per_second=400.0, seconds=60),
    NodeConfigured(
        at=NOW - 2,
        key=peer(2),
        name="fleet",
        version=3,
        since=NOW - 9,
        settings=("hours = 22:00-07:00", "upload = 10Mbit/s"),
        skipped=("cores (not allowed here)",),
    ),
    events.RunRevised(
        at=NOW - 2,
        run="0123456789abcdef",
        number=3,
        steps=200,
        learning_rate=0.001,
        priority=7,
        is_paused=True,
    ),
    events.RunReleased(at=NOW - 1, run="0123456789abcdef"),
    averaging_events.AveragingOpened(
        at=NOW - 1, run="cifar", admit="invited", aggregate="mean", is_private=False
    ),
    averaging_events.AveragingJoined(at=NOW - 1, run="cifar", peer=peer(2), peers=1),
    averaging_events.LiarProved(at=NOW - 1, run="cifar", peer=peer(2), said="averaging-seal"),
    averaging_events.StateFetched(at=NOW - 1, run="cifar", step=40, size_bytes=200_000_000, seconds=2.5),
    averaging_events.AveragingStepped(at=NOW - 1, run="cifar", step=50, samples=4_096, peers=1, seconds=2.0),
    averaging_events.AveragingEnded(
        at=NOW - 1,
        run="cifar",
        outcome="ok",
        reason="",
        step=50,
        members=2,
        averaged=(peer(1), peer(2)),
        seconds=1.8,
        sent_bytes=20_000_000,
        received_bytes=20_500_000,
    ),
    averaging_events.AveragingLeft(at=NOW - 1, run="cifar", peer=peer(2), reason="silent", peers=0),
    events.StrangerRefused(at=NOW - 1, reason="malformed", count=100),
    events.RecordShort(at=NOW - 1, purpose="weights", holders=1, wanted=3),
    events.TableMeasured(
        at=NOW - 1,
        contacts=123,
        records=9,
        own_records=2,
        nodes_estimated=980,
        records_short=1,
        is_client=False,
    ),
    *serving_events(NOW - 1, peer(1), peer(2)),
    events.MemberLeft(at=NOW, peer=peer(2)),
    events.AlertRaised(
        at=NOW, alert="disk_nearly_full", about="", level="warn", text="the disk is nearly full"
    ),
    events.AlertCleared(at=NOW, alert="disk_nearly_full", about=""),
    events.NodeStopped(at=NOW),
]


def state() -> State:
    folded = State()
    for event in HISTORY:
        folded = apply(folded, event)
    return folded


def shown(lines: list[str]) -> str:
    show(lines, stream := io.StringIO())
    return stream.getvalue()


def snapshot(text: str) -> str:
    return dedent(text).removeprefix("\n")


def test_the_screen_of_a_node_is_as_recorded() -> None:
    screen = EventScreen(seeds=2)
    assert shown([line for event in HISTORY for line in screen.lines(event_document(event))]) == snapshot(
        """
        lab-1  ...SUKPH5   new identity, kept in /data/lab-1
          listening   192.168.1.20:9747
          compute     cpu, 2 cores, 21.3 of 24.0 GB free, 118 GFLOP/s fp32 measured
          fences      incomplete, takes no stages of others: files: no landlock   (python -m node doctor)
          swarm       default; joining through 2 addresses
          On another machine:  python -m node --join 192.168.1.20:9747
          On this machine:     python -m node status --data-dir /data/lab-1
          page        http://127.0.0.1:40500   (port 9748 was taken)
          models at   https://192.168.1.20:9748/v1
        20:10:20   run fedcba98 ended with another result, efefefefefef, for ...2NASuq
        20:10:20   3 others could not reach this node: it takes none of their stages; python -m node doctor
        20:10:20   others can reach this node now
        20:10:20   datagrams do not get through to 1 of 3 peers: streams are used; python -m node doctor
        20:10:20   datagrams get through to all peers again
        20:10:20   another node has this node's identity, at 10.0.0.9:9747: it began later, and stops
        20:10:20   this machine's clock is 2 h 0 min behind the median of 5 peers: timedatectl set-ntp true
        20:10:20   this machine's clock agrees with its peers' again
        join  refused    old-box:9747   10.0.0.6 is up, but no node listens on port 9747
        20:16:40   lab-2 ...2NASuq joined (found through join)
        join  ok         10.0.0.2:97   lab-2 ...2NASuq  1.2 ms
        20:33:20   e?[2J ...3ANaba joined (found through lab-2)
        21:06:40   e?[2J is degraded, late: 5 of 8 late
        21:06:50   e?[2J answers in time again
        22:11:40   run 01234567 accepted: simple-cnn on digits, 200 steps, from lab-2
        22:11:41   run 01234567 planned: plan fedcba98
          stage 1   layers 0-2   lab-1, lab-2 (standby)
          stage 2   layer 3   e?[2J
          trainer   lab-1
        22:11:41   run 01234567 covered: stage 1 99%, stage 2 45% safe if a holder dies (lab-3 was lost once)
        22:11:41   run 01234567 stage 2: e?[2J computes at 40% of what was promised
        22:11:41   leased to run 01234567: stage 1
        step     1  loss 2.3000  256 samples/s  peers 3  bubble 15 %  rounding 6.0e-03  1 min 40 s left
        step     2  loss 1.1500  256 samples/s  peers 3  bubble 15 %  rounding 6.0e-03  1 min 39 s left
        step     3  loss 0.7667  256 samples/s  peers 3  bubble 15 %  rounding 6.0e-03  1 min 38 s left
        step     4  loss 0.5750  256 samples/s  peers 3  bubble 15 %  rounding 6.0e-03  1 min 38 s left
        step     5  loss 0.4600  256 samples/s  peers 3  bubble 15 %  rounding 6.0e-03  1 min 38 s left
        step    10  loss 0.2300  256 samples/s  peers 3  bubble 15 %  rounding 6.0e-03  1 min 35 s left
        22:12:20   e?[2J suspected by lab-2
        22:12:21   e?[2J is alive after all
        22:12:30   e?[2J suspected by lab-2
        22:12:38   e?[2J lost (no ack)
        22:12:38   e?[2J lost from stage 2 at step 13; 3 microbatches replayed
        22:12:39   run 01234567 degraded: fewer replicas
        22:12:39   run 01234567 goes on at step 13 after 1.2 s: 3 microbatches replayed, 0 steps lost
        22:12:40   run 01234567 no checkpoint of step 20: this disk is full
        22:12:40   run 01234567 checkpoint of step 12: 4.2 MB on 3 peers
        accuracy 0.975 on 360 unseen samples
        22:13:19   run 01234567 done
        22:13:18   does not serve others now: on battery
        22:13:18   run 01234567 is to train 400 samples/s over 60 s; an alert says where it does not
        22:13:18   settings of fleet, version 3: hours = 22:00-07:00, upload = 10Mbit/s
        22:13:18   settings that were skipped: cores (not allowed here)
        22:13:18   run 01234567 changed by its requester: 200 steps, priority 7, learning rate 0.001, paused
        22:13:19   run 01234567 goes on without this node
        22:13:19   averaging cifar: only peers that its owner invited take part; by mean
        22:13:19   averaging cifar: lab-2 takes part, 1 other peer
        22:13:19   averaging cifar: lab-2 is excluded: it signed two results of the same round
        22:13:19   averaging cifar: caught up with step 40, 200.0 MB in 2.5 s
        averaging cifar  step    50  4096 samples  2048 samples/s  1 other peer
        22:13:19   averaging cifar  step 50  ok 1.8 s  2 of 2 peers  40.5 MB  mean
        22:13:19   averaging cifar: lab-2 is out (silent; 0 other peers)
        22:13:19   refused 100 times so far: malformed
        22:13:19   record 'weights' is kept by 1 node of 3 wanted nodes
        22:13:19   service gpt: stage 2 is here; 2, 1 of 2 answer by stage
        22:13:19   answer of gpt continues over lab-1 -> lab-2 (text may differ): its stream broke
        22:13:19   answer of gpt: length, 40 tokens, the first after 0.25 s, 12.3 a second
        22:13:19   service gpt: stage 2 is no longer held here: it leaves
        22:13:20   lab-2 left
        22:13:20   alert: the disk is nearly full
        22:13:20   said goodbye
        """
    )


def test_the_screen_of_status_is_as_recorded() -> None:
    document = status_document(state(), NOW, {"malformed": 100, "quiet": 0})
    assert shown(status_lines(document)) == snapshot(
        """
        lab-1  ...SUKPH5   up 2 h 3 min, swarm default
          listening   192.168.1.20:9747
          reachable   yes
          compute     cpu, 2 cores, 21.3 of 24.0 GB free, 118 GFLOP/s fp32 measured
          serves      nobody else: on battery
          follows     fleet, version 3 since 2023-11-14T22:13Z
                      hours = 22:00-07:00
                      upload = 10Mbit/s
                      skipped: cores (not allowed here)
          fences      incomplete: takes no stages but of its own runs
                      missing: files: no landlock
          members     0 others alive of 2 known
          dht         123 contacts of about 980 nodes, 9 records held, 2 own; 1 store kept by too few
          join        refused  old-box:9747  10.0.0.6 is up, but no node listens on port 9747
          run         fedcba9876543210  gpt on digits  done  step 100 of 100  loss 0.2500
          run         0123456789abcdef  simple-cnn on digits  done  step 12 of 200  loss 0.1917
          refused     malformed 100
        """
    )


def test_the_screen_of_status_reports_that_all_fences_are_up() -> None:
    tried = events.FencesTried(at=NOW, fences=("limits: some",), unfenced=(), is_allowed=False)
    document = status_document(apply(state(), tried), NOW, {})
    assert document["fences"] == {
        "fences": ["limits: some"],
        "unfenced": [],
        "allow_unfenced": False,
        "takes_stages_of_others": True,
    }
    assert "fences      a stage is held to" in "\n".join(status_lines(document))


def test_the_screen_of_peers_is_as_recorded() -> None:
    assert shown(peers_lines(peers_document(state(), NOW))) == snapshot(
        """
        NAME   PEER       STATUS  SINCE   ADDRESS
        lab-2  ...2NASuq  left    0 s     10.0.0.2:97
               cpu, 2 cores, 21.3 GB free, 118 GFLOP/s; found through join
        e?[2J  ...3ANaba  dead    42.0 s  [::3]:9747
               no ack
               found through lab-2
        """
    )
    assert "no other member yet" in peers_lines(peers_document(State(), NOW))[0]


@pytest.mark.parametrize(
    ("claimed", "location", "is_doubted", "told"),
    [
        ("eu-west", "eu-west", False, "118 GFLOP/s, in eu-west"),
        ("us-east", "eu-west", True, "118 GFLOP/s, in eu-west by its round trips, not us-east"),
        ("us-east", "", True, "118 GFLOP/s, in an unknown location by its round trips, not us-east"),
        ("", "", False, "118 GFLOP/s"),
    ],
)
def test_the_accepted_location_of_a_peer_is_shown(
    claimed: str, location: str, is_doubted: bool, told: str
) -> None:
    document = peers_document(state(), NOW)
    document["peers"][0]["place"] = {"claimed": claimed, "location": location, "is_doubted": is_doubted}
    assert peers_lines(document)[2].endswith(f"{told}; found through join")


def test_a_degraded_member_shows_the_reason_until_it_is_dead() -> None:
    late = events.MemberDegraded(
        at=NOW, peer=peer(2), condition="no path", rate=0.0, seconds=0.5, reason="others reach it"
    )
    joined = events.MemberJoined(at=NOW, peer=peer(2), name="b", addresses=(), found_through="")
    held = apply(apply(State(), joined), late)
    document = peers_document(held, NOW)
    ailment = {"condition": "no path", "rate": 0.0, "seconds": 0.5, "reason": "others reach it"}
    assert document["peers"][0]["degraded"] == ailment
    assert "alive" in peers_lines(document)[1]
    assert "no path: others reach it" in peers_lines(document)[2]
    held = apply(held, events.MemberLost(at=NOW, peer=peer(2), reason="no ack"))
    assert peers_document(held, NOW)["peers"][0]["degraded"] is None


def test_the_screen_of_runs_is_as_recorded() -> None:
    document = status_document(state(), NOW, {})
    assert shown(runs_lines(document)) == snapshot(
        """
        RUN       MODEL       STATUS       STEP        LOSS    ACCURACY  RESULT
        fedcba98  gpt         done, split  100 of 100  0.2500  -         elsewhere
                  on digits, asked for by ...SUKPH5
        01234567  simple-cnn  done         12 of 200   0.1917  0.975     here
                  on digits, asked for by ...2NASuq
                  goal 400 samples/s over 60 s
        """
    )


def test_every_kind_of_event_has_its_lines_or_is_silent() -> None:
    screen = EventScreen()
    kinds = {type(event).__name__ for event in HISTORY}
    assert kinds == EVENT_KINDS.keys()
    assert screen.lines({"kind": "SomethingOfALaterVersion"}) == []


def test_the_start_screen_reports_a_taken_port_and_a_different_swarm() -> None:
    event = event_document(STARTED) | {"port": 40123, "swarm": "lab"}
    event |= {"addresses": ["/ip6/fd00::1/tcp/40123"], "join_address": "[fd00::1]:40123"}
    text = "\n".join(EventScreen().lines(event))
    assert "[fd00::1]:40123   (port 9747 was taken)" in text
    assert "python -m node --join [fd00::1]:40123 --swarm lab" in text


def test_a_node_that_listens_everywhere_says_that_anybody_may_connect() -> None:
    event = event_document(STARTED) | {"is_open": True}
    assert "open to the network: anybody may connect" in (text := "\n".join(EventScreen().lines(event)))
    assert "--listen 127.0.0.1:9747" in text
    private = "\n".join(EventScreen().lines(event | {"is_private": True}))
    assert "open to the network: members of the swarm may connect" in private


def test_the_plans_screen_shows_the_effect_of_each_death() -> None:
    planned = next(event for event in HISTORY if isinstance(event, events.RunPlanned))
    document = event_document(replace(planned, witnesses=(peer(4),), pauses_without=(peer(1), peer(2))))
    text = "\n".join(EventScreen().lines(document))
    assert "witness   " in text
    assert "stops, the run pauses until it is back" in text


def test_a_private_swarm_is_named_and_joining_asks_for_its_key() -> None:
    event = event_document(STARTED) | {"is_private": True}
    text = "\n".join(EventScreen().lines(event))
    assert "default, private; no --join given" in text
    assert "On another machine:  PEERLOOM_KEY_FILE=FILE python -m node --join" in text


def test_an_error_has_at_most_three_lines() -> None:
    assert error_lines(UsageError("a\n\nb", "c")) == ["error: a b", "  do: c"]
    assert error_lines(UsageError("a")) == ["error: a"]


def test_quantities_and_addresses_are_shortened() -> None:
    assert [seconds_text(value) for value in (0.0, 0.0012, 3.44, 59.99, 310, 7380, 400_000)] == [
        "0 s",
        "1.2 ms",
        "3.4 s",
        "1 min 0 s",
        "5 min 10 s",
        "2 h 3 min",
        "4 days",
    ]
    assert short_address("/ip6/fd00::1/tcp/9747/p2p/12D3") == "[fd00::1]:9747"
    assert short_address("10.0.0.5:9747") == "10.0.0.5:9747"


def test_json_contains_the_step_number_that_screens_show() -> None:
    screen, wanted = EventScreen(), (events.StepCommitted, events.ReplicaDropped, events.RunResumed)
    found = set()
    for event in HISTORY:
        lines = screen.lines(event_document(event))
        if isinstance(event, wanted) and lines:
            number = event_document(event)["step_number"]
            assert re.search(rf"step +{number}\b", lines[0]), lines[0]
            assert number == event_document(event)["step"] + 1
            found.add(type(event))
    assert found == set(wanted)
    rows = [row for row in status_document(state(), NOW, {})["runs"] if row["last_step"]]
    assert [row["last_step"]["step_number"] == row["step"] for row in rows] == [True]


def test_the_time_left_follows_the_mean_pace_and_not_the_last_step() -> None:
    screen = EventScreen()
    asked = events.RunAccepted(at=NOW, run="r", model="m", data="digits", steps=11, requester=peer(1))
    screen.lines(event_document(asked))
    lines: list[str] = []
    for number, seconds in enumerate((1.0, 1.0, 1.0, 7.0)):
        step = events.StepCommitted(
            at=NOW, run="r", step=number, loss=1.0, samples=8, seconds=seconds, replicas=1
        )
        lines = screen.lines(event_document(step))
    assert lines[0].endswith("  18 s left")


def test_rates_count_samples_and_tokens_if_the_loss_counts_tokens() -> None:
    step = {"samples": 32, "counted": 2_048, "seconds": 2.0}
    assert rate_text(step) == "16 samples/s  1024 tokens/s"
    assert rate_text(step | {"counted": 32}) == "16 samples/s"
    assert rate_text(step | {"seconds": 0.0}) == "0 samples/s"


@pytest.mark.parametrize(("counted", "what"), [(8, "samples"), (64, "tokens")])
def test_a_result_counts_the_units_of_the_loss(counted: int, what: str) -> None:
    screen = EventScreen()
    step = events.StepCommitted(
        at=NOW, run="r", step=0, loss=1.0, samples=8, counted=counted, seconds=1.0, replicas=1
    )
    screen.lines(event_document(step))
    result = events.RunEvaluated(at=NOW, run="r", accuracy=0.5, loss=1.0, samples=360)
    assert screen.lines(event_document(result)) == [f"accuracy 0.500 on 360 unseen {what}"]


def test_moved_layers_and_a_return_to_a_checkpoint_differ_on_screens() -> None:
    screen = EventScreen()
    first = next(event for event in HISTORY if isinstance(event, events.RunPlanned))
    screen.lines(event_document(first))
    back = msgspec.structs.replace(first, height=1, restored_step=40)
    moved = msgspec.structs.replace(back, height=2, layers=((0, 2), (2, 4)))
    assert "height 1, back to the checkpoint of step 40" in shown(screen.lines(event_document(back)))
    assert "height 2, layers moved after step 40" in shown(screen.lines(event_document(moved)))
    assert "layers moved" not in shown(EventScreen().lines(event_document(moved)))


def test_a_finished_run_without_any_reported_step_shows_no_step() -> None:
    run = "0123456789abcdef"
    ended = events.RunEnded(at=NOW, run=run, outcome="done", detail="", weights="ab", is_here=False)
    asked = events.RunAccepted(at=NOW, run=run, model="m", data="digits", steps=200, requester=peer(1))
    document = status_document(apply(apply(State(), asked), ended), NOW, {})
    assert "step 0 of 200" not in shown(status_lines(document))
    assert " of 200" not in shown(runs_lines(document))
