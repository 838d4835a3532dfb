"""Compiles grammars outside of the scheduler's loop: first in a trial process, which may be killed, then on a thread.

`submit` returns at once. `take` returns the results, and `fileno` is readable when there is one. There are up to
`NUM_THREADS` threads with a trial process each; both start when there is work for them.
"""

import logging
import math
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from protocol.sampling import GrammarKind, StructuredOutputParams
from services.scheduler.grammar.base import OVERLOADED, UNABLE, Grammar
from services.scheduler.grammar.cache import CompiledGrammar, GrammarCache, Key
from services.scheduler.grammar.errors import from_library, too_complex
from services.scheduler.grammar.limits import CACHE_BYTES, MAX_WAITING, NUM_THREADS, WAITING_SECONDS, parser_limits
from services.scheduler.grammar.matcher import Matcher
from services.scheduler.grammar.threads import LoopWakeup, deep_stacks
from services.scheduler.grammar.translate import KIND_NAMES
from services.scheduler.grammar.trial.process import TrialEnded, TrialProcess
from services.scheduler.grammar.vocabulary import GrammarVocabulary
from services.scheduler.grammar.whitespace import Whitespace

log = logging.getLogger("runahead.scheduler.grammar")

_JSON = (GrammarKind.JSON, GrammarKind.JSON_OBJECT)


@dataclass(slots=True, eq=False)
class _CompileJob:
    """One grammar and the tickets that wait for it."""

    key: Key
    since: float
    """Monotonic clock, seconds; infinite: it may wait for any time."""
    waiting: dict[int, tuple[StructuredOutputParams, tuple[int, ...]]] = field(default_factory=dict)
    """Ticket -> parameters, and the request's EOS ids. Used by the scheduler's thread only."""
    future: Future[None] = field(init=False)


class GrammarCompiler:
    """Implementation of `Compiler`. Its public methods belong to the scheduler's thread; those under "compile threads"
    belong to them."""

    def __init__(
        self, vocabulary: GrammarVocabulary, max_bytes: int = CACHE_BYTES, num_threads: int = NUM_THREADS
    ) -> None:
        self._vocabulary = vocabulary
        self._refusal: str | None = "structured output is not served: the model is not loaded yet"
        self._tokenizer: LLTokenizer | None = None
        self._n_vocab = 0
        self._whitespace: Whitespace | None = None
        self._cache = GrammarCache(max_bytes)
        self._num_threads = num_threads
        self._threads = ThreadPoolExecutor(num_threads, "grammar")
        self._processes: dict[int, TrialProcess] = {}
        """By thread."""
        self.jobs: dict[Key, _CompileJob] = {}
        """Jobs in the queue or being compiled; equal grammars share one job."""
        self._closed = threading.Event()
        self._done: deque[tuple[_CompileJob, CompiledGrammar | str]] = deque()
        self._ready: list[tuple[int, Grammar | str]] = []
        self._wakeup = LoopWakeup()
        self.counters = {"hits": 0, "compiled": 0, "refused": 0, "killed": 0}

    def fileno(self) -> int:
        """Return a file descriptor that is readable when another thread has a result for `take`."""
        return self._wakeup.fileno()

    def set_vocab_size(self, n_vocab: int) -> None:
        """Set the width of the logits. Takes as long as `GrammarVocabulary.library_tokenizer`.

        If the tokenizer cannot be used with this model, all further requests are refused with the reason.
        """
        if n_vocab == self._n_vocab:
            return
        self._n_vocab = n_vocab
        have = self._vocabulary.num_tokens
        if have > n_vocab or max(self._vocabulary.eos_token_ids) >= n_vocab:
            self._refuse(f"the tokenizer has {have} tokens, but the model's vocabulary {n_vocab}")
            return
        self._vocabulary = replace(self._vocabulary, width=n_vocab)
        try:
            self._tokenizer = self._vocabulary.library_tokenizer()
        except Exception as error:  # llguidance raises arbitrary errors for a tokenizer that it cannot use
            log.warning("llguidance cannot read the tokenizer: %s", error)
            self._refuse("the model's tokenizer is of a kind that structured output cannot use")
            return
        self._whitespace = Whitespace.from_tokenizer(self._tokenizer)
        self._refusal = None

    def _refuse(self, reason: str) -> None:
        self._refusal = f"structured output is not served: {reason}"
        log.warning("%s", self._refusal)

    # -- requests ------------------------------------------------------------------------------------------------

    def submit(
        self, ticket: int, params: StructuredOutputParams, eos_token_ids: tuple[int, ...], again: bool = False
    ) -> None:
        if self._refusal is not None:
            self._ready.append((ticket, self._refusal))
            return
        key = (params.kind, params.text)
        try:
            matcher = self._cached(key)
        except ValueError as error:  # the library starts a thread, which the system may refuse
            log.error("no grammar can be used: %s", error)
            self._ready.append((ticket, UNABLE))
            return
        if matcher is not None:
            self.counters["hits"] += 1
            self._ready.append((ticket, self._grammar(matcher, params, eos_token_ids)))
            return
        job = self.jobs.get(key)
        if job is None and len(self.jobs) >= MAX_WAITING + self._num_threads and not again:
            self._ready.append((ticket, OVERLOADED))
            return
        if job is None:
            job = _CompileJob(key, math.inf if again else time.monotonic())
            try:
                with deep_stacks():
                    job.future = self._threads.submit(self._run, job)
            except RuntimeError as error:  # the system refuses a thread; the pool keeps the job until it has one
                log.error("no grammar can be compiled: %s", error)
                job.since = -math.inf
                self._ready.append((ticket, UNABLE))
                return
            self.jobs[key] = job
        elif again:  # the requests of a lost scheduler come all at once (kept arrival)
            job.since = math.inf
        job.waiting[ticket] = params, eos_token_ids

    def cancel(self, ticket: int) -> None:
        """Drop a ticket. A grammar without tickets leaves the queue.

        A compilation that has started is bounded in time; it ends and its result is kept, which costs less than to
        replace the trial process.
        """
        self._ready = [answer for answer in self._ready if answer[0] != ticket]
        job = next((job for job in self.jobs.values() if ticket in job.waiting), None)
        if job is None:
            return
        del job.waiting[ticket]
        if not job.waiting and job.future.cancel():
            del self.jobs[job.key]
            job.key = job.key[0], ""  # the pool keeps the job until a thread is free, and the text may be long

    def _cached(self, key: Key) -> LLMatcher | None:
        matcher = self._cache.copy(key)
        if matcher is None:
            return None
        self._fill(matcher)
        if not matcher.is_error():
            return matcher
        self._cache.drop(key)  # the lexer that the copies share has reached its limit
        return None

    def _fill(self, matcher: LLMatcher) -> None:
        """Compute the first mask. Other threads run meanwhile, because llguidance releases the GIL."""
        mask = np.empty((1, -(-self._n_vocab // 32)), np.int32)
        LLExecutor(1).unsafe_compute_mask_ptr([(matcher, 0)], mask.ctypes.data, mask.nbytes, 1)

    def _grammar(self, matcher: LLMatcher, params: StructuredOutputParams, eos_token_ids: tuple[int, ...]) -> Matcher:
        whitespace = self._whitespace if params.kind in _JSON else None
        ends = self._vocabulary.eos_token_ids
        return Matcher(matcher, ends, eos_token_ids, params.begins_after, whitespace)

    def take(self) -> list[tuple[int, Grammar | str]]:
        """Return each result once: (ticket, its grammar or the reason of its refusal)."""
        self._wakeup.clear()
        while self._done:
            job, result = self._done.popleft()
            if self.jobs.get(job.key) is job:
                del self.jobs[job.key]
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
        return totals | {"grammar_cache_bytes": self._cache.num_bytes, "grammars_compiling": len(self.jobs)}

    def close(self) -> None:
        """End the threads and their trial processes. Open tickets get no result."""
        self._closed.set()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in [*self._processes.values()]:
            process.kill()
        self._threads.shutdown()
        for process in self._processes.values():
            process.close()
        self._wakeup.close()

    # -- compile threads -----------------------------------------------------------------------------------------

    def _run(self, job: _CompileJob) -> None:
        try:
            is_late = time.monotonic() - job.since > WAITING_SECONDS
            result = OVERLOADED if is_late else self._result(*job.key)
        except Exception:  # of one grammar; it would end the scheduler, with all requests
            log.exception("a %s cannot be compiled", KIND_NAMES[job.key[0]])
            self._end_process()
            result = UNABLE
        self._done.append((job, result))
        self._wakeup.set()

    def _result(self, kind: GrammarKind, text: str) -> CompiledGrammar | str:
        """Return the compiled grammar, or the reason of its refusal; nobody reads it after `close`."""
        thread = threading.get_ident()
        try:
            process = self._processes.get(thread) or TrialProcess(self._vocabulary)
        except (TrialEnded, OSError) as error:
            log.error("no grammar can be compiled: %s", error)
            return UNABLE
        self._processes[thread] = process
        if self._closed.is_set():
            return UNABLE
        try:
            verdict = process.verdict(StructuredOutputParams(kind, text))
        except TrialEnded as error:
            if self._closed.is_set():
                return UNABLE
            log.warning("a %s is refused: %s", KIND_NAMES[kind], error)
            self._end_process()
            self.counters["killed"] += 1
            return str(too_complex(KIND_NAMES[kind]))
        if verdict.error:
            return verdict.error
        return self._compile((kind, text), verdict.grammar, verdict.num_bytes, verdict.growth)

    def _end_process(self) -> None:
        if (process := self._processes.pop(threading.get_ident(), None)) is not None:
            process.close()

    def _compile(self, key: Key, grammar: str, num_bytes: int, growth: int) -> CompiledGrammar | str:
        """Compile a grammar that passed its trial. Return it, or the reason of its refusal."""
        assert self._tokenizer is not None
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=parser_limits())
        if not matcher.is_error():
            first = matcher.deep_copy()
            self._fill(first)
            if not first.is_error():
                return CompiledGrammar(matcher, num_bytes + 2 * len(key[1]), growth)
            matcher = first
        return str(from_library(KIND_NAMES[key[0]], matcher.get_error()))
