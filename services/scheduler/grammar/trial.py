"""A process that compiles grammars under limits the kernel keeps: `python -m services.scheduler.grammar.trial PARENT`.

It reads a `Setup`, then `StructuredOutputParams`, and answers each with a `Verdict`. What would run for ever, fill the
memory or overflow the stack kills it, and the scheduler starts another.

RUNAHEAD_FAILPOINT_GRAMMAR_SECONDS is for tests: each compilation takes so many seconds longer.
"""

import contextlib
import ctypes
import os
import random
import resource
import signal
import sys
import threading
import time
from typing import BinaryIO

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from protocol.sampling import StructuredOutputParams
from services.scheduler.grammar import frames
from services.scheduler.grammar.errors import GrammarError, from_library, too_complex
from services.scheduler.grammar.frames import Verdict
from services.scheduler.grammar.limits import (
    CPU_SECONDS,
    MAX_FILL_SECONDS,
    MEMORY_BYTES,
    STACK_BYTES,
    TRIAL_STEPS,
    parser_limits,
)
from services.scheduler.grammar.translate import NAMES, translate
from services.scheduler.grammar.vocabulary import Vocabulary

FAILPOINT = "RUNAHEAD_FAILPOINT_GRAMMAR_SECONDS"
_PR_SET_PDEATHSIG = 1


class _MallocInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


class Trial:
    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)
        """Of glibc; without it the size is guessed from the text."""
        if self._mallinfo is not None:
            self._mallinfo.restype = _MallocInfo

    def verdict(self, params: StructuredOutputParams) -> Verdict:
        try:
            return self._compile(params)
        except GrammarError as error:
            return Verdict(str(error))
        except (MemoryError, RecursionError):
            return Verdict(str(too_complex(NAMES[params.kind])))

    def _compile(self, params: StructuredOutputParams) -> Verdict:
        """Raises: GrammarError"""
        what = NAMES[params.kind]
        grammar = translate(params, self._is_special)
        before = self._heap()
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=parser_limits())
        if matcher.is_error():
            raise from_library(what, matcher.get_error())
        compiled = self._generate(matcher.deep_copy(), what, 1)
        self._generate(matcher.deep_copy(), what, TRIAL_STEPS)
        size = max(compiled - before, 64 * len(grammar), 1 << 14)
        return Verdict("", grammar, size, max(self._heap() - compiled, 1 << 12))

    def _generate(self, matcher: LLMatcher, what: str, steps: int) -> int:
        """A random answer of at most so many tokens, to see what each costs. Returns the heap's size then.

        Raises: GrammarError, if nothing matches or it costs too much.
        """
        mask = np.zeros((1, -(-self._tokenizer.vocab_size // 32)), np.int32)
        draws = random.Random(0)  # noqa: S311  the same for the same grammar
        for _ in range(steps):
            started = time.thread_time()
            fill_next_token_bitmask(matcher, mask)
            if matcher.is_error():
                raise from_library(what, matcher.get_error())
            if time.thread_time() - started > MAX_FILL_SECONDS:
                raise too_complex(what)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if not len(allowed):
                raise GrammarError(f"nothing can match the {what}")
            if matcher.is_stopped():
                break
            matcher.consume_token(int(allowed[draws.randrange(len(allowed))]))
        return self._heap()

    def _is_special(self, text: str) -> bool:
        token_ids = self._tokenizer.tokenize_str(text, parse_special=True)
        return len(token_ids) == 1 and self._tokenizer.is_special_token(token_ids[0])

    def _heap(self) -> int:
        """Bytes in use; there is one arena (`MALLOC_ARENA_MAX`)."""
        if self._mallinfo is None:
            return 0
        info = self._mallinfo()
        return int(info.uordblks + info.hblkhd)


def die_with_parent(parent: int) -> None:
    """The kernel kills this process when the thread that started it is gone, and so when the scheduler is."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Until there are no more requests."""
    content = _read(requests)
    if content is None:
        return
    setup = frames.decode_setup(content)
    vocabulary = Vocabulary(setup.tokenizer, setup.num_tokens, setup.eos_token_ids)
    try:
        trial = Trial(vocabulary.library_tokenizer(setup.n_vocab))
    except Exception as error:  # whatever the library says of a tokenizer
        _write(answers, Verdict(str(error) or type(error).__name__))
        return
    _write(answers, Verdict())
    _limit_memory()
    delay = float(os.environ.get(FAILPOINT) or 0)
    while (content := _read(requests)) is not None:
        _limit_processor_time()
        time.sleep(delay)
        _write(answers, trial.verdict(frames.decode_job(content)))


def _read(source: BinaryIO) -> bytes | None:
    header = source.read(frames.HEADER_BYTES)
    return source.read(int.from_bytes(header, "little")) if len(header) == frames.HEADER_BYTES else None


def _write(answers: BinaryIO, verdict: Verdict) -> None:
    answers.write(frames.encode(verdict))
    answers.flush()


def _limit_memory() -> None:
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # should memory get scarce all the same, this process is the one to go
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_processor_time() -> None:
    """From now on; beyond it the kernel ends this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + 1 + CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))


def main(parent: str) -> int:
    die_with_parent(int(parent))
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the library prints is no answer
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve, args=(sys.stdin.buffer, answers))
    thread.start()
    thread.join()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
