"""The trial process: `python -m services.scheduler.grammar.trial.child FD PARENT_PID`.

It reads a `GrammarVocabulary`, then `StructuredOutputParams`, and answers each with a `TrialVerdict`.

RUNAHEAD_FAILPOINT_GRAMMAR_SECONDS is for tests: it delays each compilation by that many seconds.
"""

import contextlib
import os
import resource
import sys
import threading
import time
from multiprocessing.connection import Connection

import msgspec

from protocol.sampling import StructuredOutputParams
from services.process import die_with_parent
from services.scheduler.grammar.limits import CPU_SECONDS, MEMORY_BYTES, STACK_BYTES
from services.scheduler.grammar.trial.measure import TrialCompiler, TrialVerdict
from services.scheduler.grammar.vocabulary import GrammarVocabulary

FAILPOINT = "RUNAHEAD_FAILPOINT_GRAMMAR_SECONDS"


def main(descriptor: str, parent: str) -> int:
    die_with_parent(int(parent))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=serve, args=(Connection(int(descriptor)),))
    thread.start()
    thread.join()
    return 0


def serve(scheduler: Connection) -> None:
    """Answer requests until the connection is closed."""
    with scheduler, contextlib.suppress(EOFError, OSError):
        vocabulary = msgspec.msgpack.decode(scheduler.recv_bytes(), type=GrammarVocabulary)
        try:
            compiler = TrialCompiler(vocabulary.library_tokenizer())
        except Exception as error:  # llguidance raises arbitrary errors for a tokenizer that it cannot use
            scheduler.send_bytes(msgspec.msgpack.encode(TrialVerdict(str(error) or type(error).__name__)))
            return
        scheduler.send_bytes(msgspec.msgpack.encode(TrialVerdict()))
        _limit_memory()
        delay = float(os.environ.get(FAILPOINT) or 0)
        while True:
            params = msgspec.msgpack.decode(scheduler.recv_bytes(), type=StructuredOutputParams)
            _limit_processor_time()
            time.sleep(delay)
            scheduler.send_bytes(msgspec.msgpack.encode(compiler.verdict(params)))


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


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
