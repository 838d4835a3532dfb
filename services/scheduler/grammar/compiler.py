"""Compiles grammars beside the scheduler's loop: first in a process that may be killed, then on a thread.

`submit` returns at once. What became of it waits in `take`, and `fileno` becomes readable when something does. There
are `LANES` threads with a trial process each, started when there is work for them.
"""

import contextlib
import logging
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from protocol.sampling import GrammarKind, StructuredOutputParams
from services.scheduler.grammar.base import Grammar
from services.scheduler.grammar.cache import Compiled, GrammarCache, Key
from services.scheduler.grammar.errors import from_library, too_complex
from services.scheduler.grammar.frames import Setup
from services.scheduler.grammar.limits import (
    CACHE_BYTES,
    LANES,
    MAX_WAITING,
    STACK_BYTES,
    WAITING_SECONDS,
    parser_limits,
)
from services.scheduler.grammar.matcher import Matcher
from services.scheduler.grammar.translate import NAMES
from services.scheduler.grammar.trial_process import TrialEnded, TrialProcess
from services.scheduler.grammar.vocabulary import Vocabulary
from services.scheduler.grammar.whitespace import Whitespace

log = logging.getLogger("runahead.scheduler.grammar")

_JSON = (GrammarKind.JSON, GrammarKind.JSON_OBJECT)
OVERLOADED = "too many grammars are waiting to be compiled; try again later"
SHUT_DOWN = "the engine is shutting down"


@dataclass(slots=True, eq=False)
class _Job:
    """One grammar, and all who wait for it."""

    key: Key
    since: float
    waiting: dict[int, tuple[StructuredOutputParams, tuple[int, ...]]] = field(default_factory=dict)
    """By ticket: what it asks for, the request's EOS ids. Of the scheduler's thread alone."""


class GrammarCompiler:
    """A `Compiler`. Its methods belong to the scheduler's thread."""

    def __init__(self, vocabulary: Vocabulary, max_bytes: int = CACHE_BYTES, lanes: int = LANES) -> None:
        self._vocabulary = vocabulary
        self._refusal: str | None = "structured output is not served: the model is not loaded yet"
        self._tokenizer: LLTokenizer | None = None
        self._n_vocab = 0
        self._whitespace: Whitespace | None = None
        self._cache = GrammarCache(max_bytes)
        self._max_lanes = lanes
        self._lanes: list[_Lane] = []
        self._jobs: dict[Key, _Job] = {}
        """Waiting or being compiled: equal ones are compiled once."""
        self._queue: deque[_Job] = deque()
        self._changed = threading.Condition()
        """Guards all of the above but the cache and the tokenizer."""
        self._idle = 0
        self._closed = False
        self._done: deque[tuple[_Job, Compiled | str]] = deque()
        self._ready: list[tuple[int, Grammar | str]] = []
        self._wakeup, self._wake = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(self._wake, False)
        self.counters = {"hits": 0, "compiled": 0, "refused": 0, "killed": 0}

    def fileno(self) -> int:
        """Readable when `take` has something that came from another thread."""
        return self._wakeup

    def use(self, n_vocab: int) -> None:
        """The width of the logits is known. Takes as long as `Vocabulary.library_tokenizer`; what cannot be served
        with this model is refused from now on, by name."""
        if self._tokenizer is not None and n_vocab == self._n_vocab:
            return
        have = self._vocabulary.num_tokens
        if have > n_vocab or max(self._vocabulary.eos_token_ids) >= n_vocab:
            self._refuse(f"the tokenizer has {have} tokens, but the model's vocabulary {n_vocab}")
            return
        try:
            self._tokenizer = self._vocabulary.library_tokenizer(n_vocab)
        except Exception as error:  # whatever the library says of a tokenizer
            log.warning("the tokenizer cannot be read by llguidance: %s", error)
            self._refuse("the model's tokenizer is of a kind that grammars cannot use")
            return
        self._whitespace = Whitespace.of(self._tokenizer)
        self._n_vocab, self._refusal = n_vocab, None

    def _refuse(self, reason: str) -> None:
        self._refusal = f"structured output is not served: {reason}"
        log.warning("%s", self._refusal)

    # -- requests ------------------------------------------------------------------------------------------------

    def submit(self, ticket: int, params: StructuredOutputParams, eos_token_ids: tuple[int, ...]) -> None:
        if self._refusal is not None:
            self._ready.append((ticket, self._refusal))
            return
        key = (params.kind, params.text)
        if (matcher := self._cached(key)) is not None:
            self.counters["hits"] += 1
            self._ready.append((ticket, self._grammar(matcher, params, eos_token_ids)))
            return
        with self._changed:
            job = self._jobs.get(key)
            if job is None and len(self._queue) >= MAX_WAITING:
                self._ready.append((ticket, OVERLOADED))
                return
            if job is None:
                job = self._jobs[key] = _Job(key, time.monotonic())
                self._queue.append(job)
                self._changed.notify()
                if len(self._queue) > self._idle and len(self._lanes) < self._max_lanes:
                    self._lanes.append(_Lane(self))
            job.waiting[ticket] = params, eos_token_ids

    def cancel(self, ticket: int) -> None:
        """A grammar that nobody waits for is not begun. One that was begun is bounded in time: it is brought to its
        end and kept, which costs less than another trial process."""
        self._ready = [answer for answer in self._ready if answer[0] != ticket]
        job = next((job for job in self._jobs.values() if ticket in job.waiting), None)
        if job is None:
            return
        del job.waiting[ticket]
        with self._changed:
            if not job.waiting and job in self._queue:
                self._queue.remove(job)
                del self._jobs[job.key]

    def _cached(self, key: Key) -> LLMatcher | None:
        matcher = self._cache.copy(key)
        if matcher is None:
            return None
        self._fill(matcher)
        if not matcher.is_error():
            return matcher
        self._cache.drop(key)  # its lexer, which the copies share, is full
        return None

    def _fill(self, matcher: LLMatcher) -> None:
        """Computes the first mask; other threads run meanwhile."""
        mask = np.empty((1, -(-self._n_vocab // 32)), np.int32)
        LLExecutor(1).unsafe_compute_mask_ptr([(matcher, 0)], mask.ctypes.data, mask.nbytes, 1)

    def _grammar(
        self, matcher: LLMatcher, params: StructuredOutputParams, eos_token_ids: tuple[int, ...]
    ) -> Matcher:
        whitespace = self._whitespace if params.kind in _JSON else None
        ends = self._vocabulary.eos_token_ids
        return Matcher(matcher, ends, eos_token_ids, params.begins_after, whitespace)

    def take(self) -> list[tuple[int, Grammar | str]]:
        """(ticket, its grammar or why there is none), each once."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wakeup, 4096)
        while self._done:
            job, result = self._done.popleft()
            with self._changed:
                del self._jobs[job.key]
            if isinstance(result, str):
                self.counters["refused"] += 1
                self._ready.extend((ticket, result) for ticket in job.waiting)
                continue
            self.counters["compiled"] += 1
            for ticket, (params, eos_token_ids) in job.waiting.items():
                self._ready.append((ticket, self._grammar(result.matcher.deep_copy(), params, eos_token_ids)))
            self._cache.put(job.key, result)
        taken, self._ready = self._ready, []
        return taken

    def stats(self) -> dict[str, float]:
        totals = {f"grammars_{name}_total": float(count) for name, count in self.counters.items()}
        return totals | {"grammar_cache_bytes": self._cache.num_bytes, "grammars_compiling": len(self._jobs)}

    def close(self) -> None:
        """Ends threads and processes. Whoever still waits is told."""
        with self._changed:
            self._closed = True
            lanes = list(self._lanes)
            self._changed.notify_all()
        for lane in lanes:
            lane.kill()
        for lane in lanes:
            lane.thread.join()
        self._ready.extend((ticket, SHUT_DOWN) for job in self._jobs.values() for ticket in job.waiting)
        self._jobs.clear()
        self._queue.clear()
        self._done.clear()
        os.close(self._wake)
        os.close(self._wakeup)

    # -- lanes ---------------------------------------------------------------------------------------------------

    def next_job(self) -> _Job | None:
        """For a lane: waits for work; None when there will be none. Those that waited too long are answered here."""
        with self._changed:
            while not self._closed:
                while self._queue:
                    job = self._queue.popleft()
                    if time.monotonic() - job.since <= WAITING_SECONDS:
                        return job
                    self.deliver(job, OVERLOADED)
                self._idle += 1
                self._changed.wait()
                self._idle -= 1
            return None

    def deliver(self, job: _Job, result: Compiled | str) -> None:
        """For a lane."""
        self._done.append((job, result))
        with contextlib.suppress(BlockingIOError):  # then it is readable anyway
            os.write(self._wake, b"\0")

    def setup(self) -> Setup:
        """For a lane: what its trial process needs."""
        v = self._vocabulary
        return Setup(v.text, v.num_tokens, v.eos_token_ids, self._n_vocab)

    def compile(self, key: Key, grammar: str, num_bytes: int, growth: int) -> Compiled | str:
        """For a lane: what passed its trial, compiled for use."""
        assert self._tokenizer is not None
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=parser_limits())
        if not matcher.is_error():
            first = matcher.deep_copy()
            self._fill(first)
            if not first.is_error():
                return Compiled(matcher, num_bytes + 2 * len(key[1]), growth)
            matcher = first
        return str(from_library(NAMES[key[0]], matcher.get_error()))


class _Lane:
    """A thread with its trial process."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._process: TrialProcess | None = None
        self._killed = threading.Event()
        before = threading.stack_size(4 * STACK_BYTES)
        self.thread = threading.Thread(target=self._run, name="grammar", daemon=True)
        try:
            self.thread.start()
        finally:
            threading.stack_size(before)

    def kill(self) -> None:
        """It ends as soon as it can; from another thread."""
        self._killed.set()
        if (process := self._process) is not None:
            process.kill()

    def _run(self) -> None:
        try:
            while (job := self._compiler.next_job()) is not None:
                self._compiler.deliver(job, self._result(job))
        finally:
            self._end_process()

    def _result(self, job: _Job) -> Compiled | str:
        kind, text = job.key
        try:
            if self._process is None:
                self._process = TrialProcess(self._compiler.setup())
        except (TrialEnded, OSError) as error:
            log.error("structured output fails: %s", error)
            return "the server cannot compile grammars at the moment; try again later"
        if self._killed.is_set():
            return SHUT_DOWN
        try:
            verdict = self._process.verdict(StructuredOutputParams(kind, text))
        except TrialEnded as error:
            if self._killed.is_set():
                return SHUT_DOWN
            log.warning("a %s was refused: %s", NAMES[kind], error)
            self._end_process()
            self._compiler.counters["killed"] += 1
            return str(too_complex(NAMES[kind]))
        if verdict.error:
            return verdict.error
        return self._compiler.compile(job.key, verdict.grammar, verdict.num_bytes, verdict.growth)

    def _end_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.close()
