"""The trial process: reads a `TrialSetup`, then `StructuredOutputParams`, and answers each with a `TrialVerdict`.

RUNAHEAD_FAILPOINT_GRAMMAR_SECONDS is for tests: it delays each compilation by that many seconds.
"""

import contextlib
import os
import resource
import sys
import threading
import time
from typing import BinaryIO

from services.process import die_with_parent
from services.scheduler.grammar.limits import CPU_SECONDS, MEMORY_BYTES, STACK_BYTES
from services.scheduler.grammar.trial import messages
from services.scheduler.grammar.trial.measure import TrialCompiler
from services.scheduler.grammar.trial.messages import TrialVerdict
from services.scheduler.grammar.vocabulary import GrammarVocabulary

FAILPOINT = "RUNAHEAD_FAILPOINT_GRAMMAR_SECONDS"


def main(parent: str) -> int:
    die_with_parent(int(parent))
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # llguidance may print; that must not reach the answers
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve, args=(sys.stdin.buffer, answers))
    thread.start()
    thread.join()
    return 0


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until the pipe is closed."""
    content = _read(requests)
    if content is None:
        return
    setup = messages.decode_setup(content)
    vocabulary = GrammarVocabulary(setup.tokenizer, setup.num_tokens, setup.eos_token_ids)
    try:
        compiler = TrialCompiler(vocabulary.library_tokenizer(setup.n_vocab))
    except Exception as error:  # llguidance raises arbitrary errors for a tokenizer that it cannot use
        _write(answers, TrialVerdict(str(error) or type(error).__name__))
        return
    _write(answers, TrialVerdict())
    _limit_memory()
    delay = float(os.environ.get(FAILPOINT) or 0)
    while (content := _read(requests)) is not None:
        _limit_processor_time()
        time.sleep(delay)
        _write(answers, compiler.verdict(messages.decode_params(content)))


def _read(source: BinaryIO) -> bytes | None:
    header = source.read(messages.HEADER_BYTES)
    return source.read(int.from_bytes(header, "little")) if len(header) == messages.HEADER_BYTES else None


def _write(answers: BinaryIO, verdict: TrialVerdict) -> None:
    answers.write(messages.encode(verdict))
    answers.flush()


def _limit_memory() -> None:
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if the machine runs out of memory, the kernel ends this process first
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_processor_time() -> None:
    """Grant `CPU_SECONDS` from now on. The kernel ends this process when they are used up."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + 1 + CPU_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
