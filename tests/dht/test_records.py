"""Records: none can be forged, an older one never replaces a newer, and the store stays bounded."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crypto.encoding import encode
from crypto.errors import LocalProtocolError, RemoteProtocolError
from crypto.facts import Fact
from dht.keys import Key, distance, record_key
from dht.records import (
    CLOCK_SLACK_SECONDS,
    LIFETIME_SECONDS_MAX,
    VALUE_BYTES_MAX,
    Record,
    RecordBody,
    RecordStore,
    Refusal,
    check_record,
    sign_record,
)
from dht.settings import KademliaSettings
from tests.dht.swarm import WALL, record, signer

KEY = record_key("test", b"name")
OTHER = record_key("test", b"other")
SMALL = KademliaSettings(records_max=6, records_per_key_max=3, records_per_publisher_max=2)


def checked(author: int, **what: object) -> Record:
    key = what.pop("key", KEY)
    return check_record(signer(0), record(author, key, **what))  # type: ignore[arg-type]  # a test's shorthand


def test_a_record_contains_what_its_publisher_signed() -> None:
    fact = sign_record(signer(7), KEY, b"value", sequence=3, expires=int(WALL))
    assert check_record(signer(0), fact) == Record(signer(7).peer, KEY, b"value", 3, int(WALL), fact)


def test_a_forged_or_altered_record_is_refused() -> None:
    good = record(1, KEY)
    body = encode(RecordBody(KEY, b"other", 1, int(WALL)))
    forgeries = [
        msgspec.structs.replace(good, body=body),
        msgspec.structs.replace(good, author=signer(2).peer),
        msgspec.structs.replace(good, signature=bytes(64)),
        msgspec.structs.replace(good, signature=b""),
        msgspec.structs.replace(good, author=b"x"),
        signer(1).sign("contact", good.body),
    ]
    for forgery in forgeries:
        with pytest.raises(RemoteProtocolError):
            check_record(signer(0), forgery)


@given(st.binary(max_size=1_200))
def test_a_validly_signed_body_of_random_bytes_is_refused(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        check_record(signer(0), signer(1).sign("dht-record", body))


@pytest.mark.parametrize(
    "body",
    [
        RecordBody(KEY, bytes(VALUE_BYTES_MAX + 1), 1, int(WALL)),
        RecordBody(KEY[:-1], b"", 1, int(WALL)),
        RecordBody(KEY, b"", -1, int(WALL)),
        RecordBody(KEY, b"", 1, 2**63),
    ],
)
def test_a_record_out_of_bounds_is_refused(body: RecordBody) -> None:
    fact: Fact = signer(1).sign("dht-record", encode(body))
    with pytest.raises(RemoteProtocolError):
        check_record(signer(0), fact)


def test_signing_a_record_out_of_bounds_raises_a_local_error() -> None:
    with pytest.raises(LocalProtocolError):
        sign_record(signer(1), KEY, bytes(VALUE_BYTES_MAX + 1), sequence=1, expires=1)
    with pytest.raises(LocalProtocolError):
        sign_record(signer(1), KEY, b"", sequence=-1, expires=1)


def test_the_largest_record_fits_one_message_of_its_announced_size() -> None:
    assert len(encode(record(1, KEY, bytes(VALUE_BYTES_MAX), 2**63 - 1))) <= 1_060


def test_a_lower_sequence_is_refused_and_a_higher_replaces() -> None:
    store = RecordStore(KademliaSettings())
    assert store.put(WALL, checked(1, sequence=2)) is None
    assert store.put(WALL, checked(1, sequence=1)) is Refusal.OLD
    assert store.put(WALL, checked(1, sequence=2)) is None
    assert store.put(WALL, checked(1, sequence=3, value=b"new")) is None
    assert [held.value for held in store.get(WALL, KEY)] == [b"new"]
    assert len(store) == 1


@given(st.permutations([(1, b"a", 60), (2, b"a", 60), (2, b"a", 90), (2, b"b", 90)]))
def test_any_order_of_arrival_keeps_the_same_record(order: list[tuple[int, bytes, int]]) -> None:
    store = RecordStore(KademliaSettings())
    for sequence, value, seconds in order:
        store.put(WALL, checked(1, sequence=sequence, value=value, expires=WALL + seconds))
    assert [(held.sequence, held.value) for held in store.get(WALL, KEY)] == [(2, b"b")]


def test_an_expired_record_is_removed_after_ten_minutes_of_slack() -> None:
    store = RecordStore(KademliaSettings())
    assert store.put(WALL, checked(1, expires=WALL + 100)) is None
    edge = WALL + 100 + CLOCK_SLACK_SECONDS
    assert len(store.get(edge, KEY)) == 1
    assert store.expire(edge) == 0
    assert store.get(edge + 1, KEY) == []
    assert store.expire(edge + 1) == 1
    assert len(store) == 0
    assert store.put(edge + 1, checked(1, expires=WALL + 100)) is Refusal.EXPIRED


def test_an_expiry_more_than_two_days_ahead_is_refused() -> None:
    store = RecordStore(KademliaSettings())
    edge = WALL + LIFETIME_SECONDS_MAX + CLOCK_SLACK_SECONDS
    assert store.put(WALL, checked(1, expires=edge)) is None
    assert store.put(WALL, checked(2, expires=edge + 1)) is Refusal.FAR


def test_the_store_is_limited_per_key_per_publisher_and_in_total() -> None:
    store = RecordStore(SMALL)
    keys = [record_key("test", bytes([number])) for number in range(9)]
    for author in (1, 2, 3):
        assert store.put(WALL, checked(author)) is None
    assert store.put(WALL, checked(4)) is Refusal.KEY_FULL
    assert store.put(WALL, checked(1, key=keys[1])) is None
    assert store.put(WALL, checked(1, key=keys[2])) is Refusal.PUBLISHER_FULL
    assert store.put(WALL, checked(5, key=keys[3])) is None
    assert store.put(WALL, checked(5, key=keys[4])) is None
    near, far = Key(bytes(20)), Key(b"\xff" * 20)
    assert store.put(WALL, checked(6, key=far)) is Refusal.FULL
    # A nearer record replaces the farthest.
    assert store.put(WALL, checked(6, key=near)) is None
    farthest = max((KEY, keys[1], keys[3], keys[4]), key=lambda key: distance(key, near))
    assert len(store.get(WALL, farthest)) < 3
    # A newer version of a stored record needs no extra room.
    assert store.put(WALL, checked(1, sequence=9)) is None
    assert len(store) == 6


def test_expired_records_make_room_for_new_ones() -> None:
    store = RecordStore(SMALL)
    for author in (1, 2, 3):
        store.put(WALL, checked(author, expires=WALL + 1))
    later = WALL + 2 + CLOCK_SLACK_SECONDS
    assert store.expire(later) == 3
    assert store.put(later, checked(4)) is None


def test_records_under_a_key_are_ordered_by_publisher() -> None:
    store = RecordStore(KademliaSettings())
    for author in range(9):
        store.put(WALL, checked(author))
    publishers = [held.publisher for held in store.get(WALL, KEY)]
    assert publishers == sorted(publishers)
