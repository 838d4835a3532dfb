"""Bounds of the store of responses."""

import tracemalloc
from typing import Any

import pytest

from services.frontend.errors import APIError
from services.frontend.responses_api.schemas import InputMessage
from services.frontend.responses_api.store import MAX_SECONDS, ResponseStore


class HandClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def response(id: str, text: str = "x") -> Any:
    part = {"type": "output_text", "text": text}
    return {"id": id, "output": [{"type": "message", "role": "assistant", "content": [part]}]}


GIVEN = [InputMessage(role="user", content="Hi")]


def test_the_oldest_make_room_and_a_giant_is_not_stored() -> None:
    store = ResponseStore(max_bytes=6000)
    for number in range(10):
        store.add("", response(str(number), "x" * 500), [], GIVEN)
    kept = [number for number in range(10) if is_stored(store, str(number))]
    assert kept == list(range(10 - len(kept), 10))
    assert 1 < len(kept) < 6
    assert store.size <= 6000
    store.add("", response("giant", "x" * 9000), [], GIVEN)
    assert not is_stored(store, "giant")
    assert is_stored(store, "9")


def test_responses_expire() -> None:
    clock = HandClock()
    store = ResponseStore(clock=clock)
    store.add("", response("a"), [], GIVEN)
    clock.now = MAX_SECONDS - 1
    store.add("", response("b"), [], GIVEN)
    assert is_stored(store, "a")
    clock.now = MAX_SECONDS
    assert not is_stored(store, "a")
    assert is_stored(store, "b")


def is_stored(store: ResponseStore, id: str, tenant: str = "") -> bool:
    try:
        return store.get(tenant, id).id == id
    except APIError:
        return False


def test_deleting_twice_is_an_error() -> None:
    store = ResponseStore()
    store.add("", response("a"), [], GIVEN)
    store.delete("", "a")
    with pytest.raises(APIError):
        store.delete("", "a")


def test_one_key_does_not_evict_the_responses_of_others() -> None:
    store = ResponseStore(max_bytes=20_000)
    for tenant in ("a", "b"):
        for number in range(2):
            store.add(tenant, response(f"{tenant}{number}", "x" * 500), [], GIVEN)
    for number in range(100):
        store.add("flood", response(f"flood{number}", "x" * 500), [], GIVEN)
    assert all(is_stored(store, f"{tenant}{number}", tenant) for tenant in ("a", "b") for number in range(2))
    assert is_stored(store, "flood99", "flood")
    assert not is_stored(store, "flood0", "flood")
    store.add("a", response("a2", "x" * 500), [], GIVEN)
    assert all(is_stored(store, f"a{number}", "a") for number in range(3))


def test_conversation_is_that_which_was_stored() -> None:
    store = ResponseStore()
    history = [InputMessage(role="system", content="Be brief.")]
    store.add("", response("a", "Hello"), history, GIVEN)
    found = store.get("", "a")
    assert found.items()[:2] == [*history, *GIVEN]
    assert found.items()[2].model_dump(exclude_unset=True) == response("a", "Hello")["output"][0]
    assert found.given() == GIVEN


def test_stored_bytes_are_those_of_memory() -> None:
    """Parsed items take several times the size of their JSON."""
    store = ResponseStore()
    many = [InputMessage(role="user", content="Hi") for _ in range(100)]
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(100):
            store.add("", response(str(number)), many, GIVEN)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 1.1 * store.size
