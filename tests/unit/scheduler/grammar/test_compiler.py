"""The compiler beside the loop: what is shared, what is bounded, and what is left when it closes."""

import json
import os
import select
import signal
import subprocess
import sys
import time

import psutil
import pytest

from protocol.sampling import GrammarKind, StructuredOutputParams
from services.scheduler.grammar import compiler as compiler_module
from services.scheduler.grammar.cache import Compiled, GrammarCache
from services.scheduler.grammar.compiler import OVERLOADED, SHUT_DOWN, GrammarCompiler
from services.scheduler.grammar.trial import FAILPOINT
from tests.unit.scheduler.grammar.support import N_VOCAB, VOCABULARY, Desk, matches, wait

REGEX = GrammarKind.REGEX


def children() -> set[int]:
    """Process ids of trial processes, those of other compilers among them."""
    found = psutil.Process().children()
    return {child.pid for child in found if "services.scheduler.grammar.trial" in child.cmdline()}


def opened(**more: int) -> Desk:
    compiler = GrammarCompiler(VOCABULARY, **more)
    compiler.use(N_VOCAB)
    return Desk(compiler)


def test_equal_grammars_in_flight_are_compiled_once(desk: Desk) -> None:
    before = desk.compiler.counters["compiled"]
    tickets = [desk.submit(REGEX, "once only") for _ in range(20)]
    found = wait(desk.compiler, *tickets)
    assert all(matches(found[ticket], "once only") for ticket in tickets)
    assert desk.compiler.counters["compiled"] == before + 1


def test_a_grammar_that_is_known_waits_for_nothing(desk: Desk) -> None:
    desk.grammar(REGEX, "known")
    ticket = desk.submit(REGEX, "known")
    assert [number for number, _ in desk.compiler.take()] == [ticket]


def test_kinds_with_equal_texts_are_not_the_same(desk: Desk) -> None:
    assert matches(desk.grammar(GrammarKind.CHOICE, '["a"]'), "a")
    assert matches(desk.grammar(REGEX, '["a"]'), '"')


def test_a_flood_of_schemas_leaves_bounded_bytes() -> None:
    most = 4 << 20
    desk = opened(max_bytes=most)
    try:
        for first in range(0, 240, 24):
            tickets = [
                desk.submit(GrammarKind.JSON, json.dumps({"type": "object", "properties": {f"p{i}": {}}}))
                for i in range(first, first + 24)
            ]
            found = wait(desk.compiler, *tickets)
            assert not any(isinstance(result, str) for result in found.values())
            assert 0 < desk.compiler.stats()["grammar_cache_bytes"] <= most
        assert desk.compiler.counters["compiled"] == 240
        desk.result(GrammarKind.JSON, json.dumps({"type": "object", "properties": {"p0": {}}}))
        assert desk.compiler.counters["compiled"] == 241, "the first one was forgotten"
    finally:
        desk.compiler.close()


def test_a_killed_trial_process_is_replaced() -> None:
    others, desk = children(), opened(lanes=1)
    try:
        desk.grammar(REGEX, "first")
        (child,) = children() - others
        os.kill(child, signal.SIGKILL)
        assert isinstance(desk.result(REGEX, "second"), str), (
            "who was being compiled cannot be known to be harmless"
        )
        assert matches(desk.grammar(REGEX, "third"), "third")
        assert child not in children()
        assert len(children() - others) == 1
    finally:
        desk.compiler.close()


def test_closing_ends_processes_and_threads_and_tells_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAILPOINT, "60")
    others, desk = children(), opened()
    tickets = [desk.submit(REGEX, f"slow {i}") for i in range(3)]
    assert desk.compiler.take() == []
    lanes = list(desk.compiler._lanes)
    desk.compiler.close()
    assert dict(desk.compiler._ready) == dict.fromkeys(tickets, SHUT_DOWN)
    assert not any(lane.thread.is_alive() for lane in lanes)
    assert not children() - others


def test_no_process_is_started_before_there_is_work() -> None:
    others, desk = children(), opened()
    try:
        assert not children() - others
        for work in ("some", "more", "yet more"):
            desk.grammar(REGEX, work)
            assert len(children() - others) == 1
    finally:
        desk.compiler.close()


def test_more_than_may_wait_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAILPOINT, "60")
    monkeypatch.setattr(compiler_module, "MAX_WAITING", 4)
    desk = opened()
    try:
        for i in range(12):
            desk.submit(REGEX, f"slow {i}")
        refused = desk.compiler.take()
        assert len(refused) >= 12 - 4 - 2
        assert {result for _, result in refused} == {OVERLOADED}
    finally:
        desk.compiler.close()


def begun(desk: Desk) -> None:
    """Waits until a lane has taken what there is."""
    while desk.compiler._queue:
        time.sleep(0.01)


def test_what_nobody_waits_for_any_more_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAILPOINT, "60")
    monkeypatch.setattr(compiler_module, "MAX_WAITING", 2)
    desk = opened(lanes=1)
    try:
        desk.submit(REGEX, "slow")
        begun(desk)
        alone, first, second = (desk.submit(REGEX, text) for text in ("alone", "shared", "shared"))
        assert desk.compiler.stats()["grammars_compiling"] == 3
        desk.compiler.cancel(first)
        assert desk.compiler.stats()["grammars_compiling"] == 3, "another one waits for it"
        desk.compiler.cancel(alone)
        assert desk.compiler.stats()["grammars_compiling"] == 2
        desk.submit(REGEX, "alone")
        assert desk.compiler.take() == [], "there is room in the queue again"
        desk.compiler.cancel(second)
        assert [job.key[1] for job in desk.compiler._queue] == ["alone"]
    finally:
        desk.compiler.close()


def test_what_was_begun_is_brought_to_its_end_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAILPOINT, "0.2")
    desk = opened(lanes=1)
    try:
        ticket = desk.submit(REGEX, "begun")
        begun(desk)
        desk.compiler.cancel(ticket)
        assert select.select([desk.compiler.fileno()], [], [], 60)[0]
        assert desk.compiler.take() == []
        known = desk.submit(REGEX, "begun")
        desk.compiler.cancel(known)
        assert desk.compiler.take() == []
        assert (desk.compiler.counters["compiled"], desk.compiler.counters["hits"]) == (1, 1)
    finally:
        desk.compiler.close()


def test_who_waited_too_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "WAITING_SECONDS", -1.0)
    desk = opened()
    try:
        assert desk.result(REGEX, "late") == OVERLOADED
    finally:
        desk.compiler.close()


@pytest.mark.parametrize("width", [VOCABULARY.num_tokens - 1, 32])
def test_a_tokenizer_larger_than_the_model_is_refused_by_name(width: int) -> None:
    compiler = GrammarCompiler(VOCABULARY)
    try:
        compiler.use(width)
        compiler.submit(1, StructuredOutputParams(REGEX, "a"), ())
        ((_, refusal),) = compiler.take()
        assert isinstance(refusal, str)
        assert "tokenizer has 4096 tokens" in refusal
        assert str(width) in refusal
    finally:
        compiler.close()


def test_the_wake_up_is_readable_until_it_was_taken(desk: Desk) -> None:
    desk.submit(REGEX, "wake up")
    assert select.select([desk.compiler.fileno()], [], [], 60)[0]
    assert len(desk.compiler.take()) == 1
    assert not select.select([desk.compiler.fileno()], [], [], 0)[0]


def test_a_trial_process_dies_with_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent is killed, not stopped: it can do nothing for its children."""
    code = (
        "import sys, time\n"
        "from tests.unit.scheduler.grammar.test_compiler import opened, children\n"
        "desk = opened(); desk.grammar(2, 'a')\n"
        "print(*children(), flush=True); time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": "."}
    )
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    psutil.wait_procs([child], timeout=60)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


class _Entry:
    """Stands for a compiled grammar; the cache only copies it."""

    def deep_copy(self) -> "_Entry":
        return _Entry()


def entry(num_bytes: int, growth: int = 0) -> Compiled:
    return Compiled(_Entry(), num_bytes, growth)  # type: ignore[arg-type]


def test_the_cache_forgets_the_least_recently_used_first() -> None:
    cache = GrammarCache(100)
    keys = [(REGEX, text) for text in "abcde"]
    for key in keys[:4]:
        cache.put(key, entry(25))
    assert cache.copy(keys[0]) is not None
    cache.put(keys[4], entry(25))
    assert [cache.copy(key) is not None for key in keys] == [True, False, True, True, True]
    assert cache.num_bytes == 100


def test_the_cache_forgets_what_has_grown_too_much() -> None:
    cache = GrammarCache(100)
    cache.put((REGEX, "a"), entry(10, growth=5))
    copies = 0
    while cache.copy((REGEX, "a")) is not None:
        copies += 1
    assert copies == 4
    assert cache.num_bytes == 0


def test_what_is_larger_than_the_cache_is_not_kept() -> None:
    cache = GrammarCache(100)
    cache.put((REGEX, "a"), entry(26))
    assert (len(cache), cache.num_bytes) == (0, 0)
