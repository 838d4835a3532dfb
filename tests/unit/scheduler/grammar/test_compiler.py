"""The grammar compiler: shared compilations, limits, cancelled requests and its end."""

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import psutil
import pytest

from protocol.sampling import GrammarKind, StructuredOutputParams
from services.helper_process import HelperProcess
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.limits import Limits
from services.scheduler.grammar import compiler as compiler_module
from services.scheduler.grammar.base import OVERLOADED, UNABLE
from services.scheduler.grammar.cache import CompiledGrammar, GrammarCache
from services.scheduler.grammar.trial import process as process_module
from services.scheduler.grammar.trial.child import FAILPOINT
from services.scheduler.grammar.trial.process import MODULE
from services.scheduler.policies import ChunkedPolicy
from tests.simulation.requests import generate
from tests.unit.scheduler.grammar.support import (
    N_VOCAB,
    VOCABULARY,
    CompilerClient,
    matches,
    new_compiler,
    tokens_of,
    wait,
)
from tests.waiting import is_alive, wait_until

REGEX = GrammarKind.REGEX


def children() -> set[int]:
    """Return the process ids of all trial processes, also of other compilers."""
    found = psutil.Process().children()
    return {child.pid for child in found if MODULE in child.cmdline()}


def test_equal_grammars_in_flight_are_compiled_once(compiler: CompilerClient) -> None:
    before = compiler.inner.counters["compiled"]
    tickets = [compiler.submit(REGEX, "once only") for _ in range(20)]
    found = wait(compiler.inner, *tickets)
    assert all(matches(found[ticket], "once only") for ticket in tickets)
    assert compiler.inner.counters["compiled"] == before + 1


def test_cached_grammar_is_returned_at_once(compiler: CompilerClient) -> None:
    compiler.grammar(REGEX, "known")
    ticket = compiler.submit(REGEX, "known")
    assert [number for number, _ in compiler.inner.take()] == [ticket]


def test_equal_texts_of_different_kinds_are_different_grammars(compiler: CompilerClient) -> None:
    assert matches(compiler.grammar(GrammarKind.CHOICE, '["a"]'), "a")
    assert matches(compiler.grammar(REGEX, '["a"]'), '"')


def test_cache_stays_bounded_under_many_schemas() -> None:
    max_bytes = 4 << 20
    with new_compiler(max_bytes=max_bytes) as compiler:
        for first in range(0, 240, 24):
            tickets = [
                compiler.submit(GrammarKind.JSON, json.dumps({"type": "object", "properties": {f"p{i}": {}}}))
                for i in range(first, first + 24)
            ]
            found = wait(compiler.inner, *tickets)
            assert not any(isinstance(result, str) for result in found.values())
            assert 0 < compiler.inner.stats()["grammar_cache_bytes"] <= max_bytes
        assert compiler.inner.counters["compiled"] == 240
        compiler.result(GrammarKind.JSON, json.dumps({"type": "object", "properties": {"p0": {}}}))
        assert compiler.inner.counters["compiled"] == 241, "the first schema is not in the cache any more"


def test_killed_trial_process_is_replaced() -> None:
    others = children()
    with new_compiler(num_threads=1) as compiler:
        compiler.grammar(REGEX, "first")
        (child,) = children() - others
        os.kill(child, signal.SIGKILL)
        assert isinstance(compiler.result(REGEX, "second"), str), (
            "the grammar may have killed the process, so it is refused"
        )
        assert matches(compiler.grammar(REGEX, "third"), "third")
        assert child not in children()
        assert len(children() - others) == 1


def test_trial_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAILPOINT, "3600")
    monkeypatch.setattr(process_module, "WALL_SECONDS", 0.01)
    others = children()
    with new_compiler(num_threads=1) as compiler:
        assert "too much time" in compiler.refusal(REGEX, "first")
        assert compiler.inner.counters["killed"] == 1
        assert not children() - others


def raise_any(*_: object) -> bytes:
    raise RuntimeError


@pytest.mark.parametrize("exchange", [lambda *_: b"\xc1", raise_any])
def test_a_trial_process_that_answers_with_nonsense_is_replaced(
    monkeypatch: pytest.MonkeyPatch, exchange: Callable[..., bytes]
) -> None:
    with new_compiler(num_threads=1) as compiler:
        compiler.grammar(REGEX, "first")
        with monkeypatch.context() as patched:
            patched.setattr(HelperProcess, "exchange", exchange)
            assert isinstance(compiler.result(REGEX, "second"), str)
        assert matches(compiler.grammar(REGEX, "third"), "third")


def no_thread(*_: object) -> None:
    raise ValueError("Resource temporarily unavailable (os error 11)")


@pytest.mark.parametrize("text", ["cached", "new"])
def test_a_grammar_for_which_the_library_gets_no_thread_is_refused(
    compiler: CompilerClient, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    compiler.grammar(REGEX, "cached")
    with monkeypatch.context() as patched:
        patched.setattr(compiler_module, "LLExecutor", no_thread)
        assert compiler.refusal(REGEX, text) == UNABLE
    assert matches(compiler.grammar(REGEX, text), text)


def test_a_new_grammar_for_which_the_system_refuses_a_thread_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with new_compiler() as compiler:
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", no_thread)
            assert compiler.refusal(REGEX, "a+") == UNABLE
        assert not compiler.inner.jobs
        assert matches(compiler.grammar(REGEX, "a+"), "aa")


def compile_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("grammar")}


def test_close_ends_processes_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAILPOINT, "60")
    others, other_threads = children(), compile_threads()
    with new_compiler() as compiler:
        for i in range(3):
            compiler.submit(REGEX, f"slow {i}")
        assert compiler.inner.take() == []
        assert compile_threads() - other_threads
    assert not compile_threads() - other_threads
    assert not children() - others


def test_no_process_is_started_before_there_is_work_and_one_serves_all_of_a_thread() -> None:
    others = children()
    with new_compiler(num_threads=1) as compiler:
        assert not children() - others
        for work in ("some", "more", "yet more"):
            compiler.grammar(REGEX, work)
            assert len(children() - others) == 1


def test_full_queue_refuses_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAILPOINT, "60")
    monkeypatch.setattr(compiler_module, "MAX_WAITING", 4)
    with new_compiler() as compiler:
        for i in range(12):
            compiler.submit(REGEX, f"slow {i}")
        refused = compiler.inner.take()
        assert len(refused) >= 12 - 4 - 2
        assert {result for _, result in refused} == {OVERLOADED}


def test_requests_of_a_lost_scheduler_find_room_whatever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "MAX_WAITING", 1)
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, num_blocks=64, block_size=4)
    with new_compiler() as compiler:
        core = EngineCore(limits, ChunkedPolicy(), 2, N_VOCAB, compiler=compiler.inner)
        for number in range(8):
            text = f"text {number}"
            tokens, grammar = [1, *tokens_of(text)[:1]], StructuredOutputParams(REGEX, text)
            core.add(0, generate(tokens, number, prompt=1, max_tokens=9, structured=grammar, age=1.0))
        monkeypatch.setattr(compiler_module, "WAITING_SECONDS", -1.0)
        for ticket, found in wait(compiler.inner, *range(1, 9)).items():
            core.on_grammar(ticket, found)
        assert len(core.store.waiting) == 8


def test_cancelled_grammar_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAILPOINT, "60")
    monkeypatch.setattr(compiler_module, "MAX_WAITING", 2)
    with new_compiler(num_threads=1) as compiler:
        compiler.submit(REGEX, "slow")
        wait_until(compiler.inner.jobs[REGEX, "slow"].future.running, "it has started")
        alone, first, second = (compiler.submit(REGEX, text) for text in ("alone", "shared", "shared"))
        assert compiler.inner.stats()["grammars_compiling"] == 3
        compiler.inner.cancel(first)
        assert compiler.inner.stats()["grammars_compiling"] == 3, "another ticket waits for it"
        compiler.inner.cancel(alone)
        assert compiler.inner.stats()["grammars_compiling"] == 2
        compiler.submit(REGEX, "alone")
        assert compiler.inner.take() == [], "the queue has room again"
        compiler.inner.cancel(second)
        compiler.submit(REGEX, "alone")
        assert compiler.inner.stats()["grammars_compiling"] == 2, "it is the one that is left in the queue"
        long = "x" * 10_000
        references = sys.getrefcount(long)
        compiler.inner.cancel(compiler.submit(REGEX, long))
        assert sys.getrefcount(long) == references, "nothing keeps its text"


def test_cancelled_compilation_that_has_started_ends_and_is_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FAILPOINT, "0.2")
    with new_compiler(num_threads=1) as compiler:
        ticket = compiler.submit(REGEX, "started")
        wait_until(compiler.inner.jobs[REGEX, "started"].future.running, "it has started")
        compiler.inner.cancel(ticket)
        assert select.select([compiler.inner.fileno()], [], [], 60)[0]
        assert compiler.inner.take() == []
        known = compiler.submit(REGEX, "started")
        compiler.inner.cancel(known)
        assert compiler.inner.take() == []
        assert (compiler.inner.counters["compiled"], compiler.inner.counters["hits"]) == (1, 1)


def test_grammar_that_waited_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "WAITING_SECONDS", -1.0)
    with new_compiler() as compiler:
        assert compiler.result(REGEX, "late") == OVERLOADED


@pytest.mark.parametrize("width", [VOCABULARY.num_tokens - 1, 32])
def test_tokenizer_larger_than_the_model_is_refused_with_both_sizes(width: int) -> None:
    with new_compiler() as compiler:  # with the width of config.json, before the workers are there
        compiler.inner.set_vocab_size(width)
        refusal = compiler.refusal(REGEX, "a")
        assert "tokenizer has 4096 tokens" in refusal
        assert str(width) in refusal


def test_file_descriptor_is_readable_until_the_result_is_taken(compiler: CompilerClient) -> None:
    compiler.submit(REGEX, "wake up")
    assert select.select([compiler.inner.fileno()], [], [], 60)[0]
    assert len(compiler.inner.take()) == 1
    assert not select.select([compiler.inner.fileno()], [], [], 0)[0]


def test_trial_process_ends_with_its_parent() -> None:
    """The parent is killed by SIGKILL, so it cannot end its children itself."""
    code = (
        "import sys, time\n"
        "from tests.unit.scheduler.grammar.test_compiler import new_compiler, children\n"
        "with new_compiler() as compiler:\n"
        "    compiler.grammar(2, 'a')\n"
        "    print(*children(), flush=True)\n"
        "    time.sleep(600)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": "."}
    )
    child = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not is_alive(child), "it has ended")


class _Entry:
    """Double of a compiled grammar, which the cache only copies."""

    def deep_copy(self) -> "_Entry":
        return _Entry()


def entry(num_bytes: int, growth: int = 0) -> CompiledGrammar:
    return CompiledGrammar(_Entry(), num_bytes, growth)  # type: ignore[arg-type]


def test_cache_drops_the_least_recently_used_first() -> None:
    cache = GrammarCache(100)
    keys = [(REGEX, text) for text in "abcde"]
    for key in keys[:4]:
        cache.put(key, entry(25))
    assert cache.copy(keys[0]) is not None
    cache.put(keys[4], entry(25))
    assert [cache.copy(key) is not None for key in keys] == [True, False, True, True, True]
    assert cache.num_bytes == 100


def test_cache_drops_an_entry_that_has_grown_too_much() -> None:
    cache = GrammarCache(100)
    cache.put((REGEX, "a"), entry(10, growth=5))
    copies = 0
    while cache.copy((REGEX, "a")) is not None:
        copies += 1
    assert copies == 4
    assert cache.num_bytes == 0


def test_entry_above_a_quarter_of_the_cache_is_not_kept() -> None:
    cache = GrammarCache(100)
    cache.put((REGEX, "a"), entry(26))
    assert cache.num_bytes == 0
