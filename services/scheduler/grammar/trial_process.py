"""The scheduler's side of a trial process."""

import contextlib
import os
import select
import subprocess
import sys
import time

from protocol.sampling import StructuredOutputParams
from services.scheduler.grammar import frames
from services.scheduler.grammar.frames import Setup, Verdict
from services.scheduler.grammar.limits import SETUP_SECONDS, WALL_SECONDS

MODULE = "services.scheduler.grammar.trial"


class TrialEnded(Exception):
    """The process ended or was ended before it answered."""


class TrialProcess:
    """Its methods belong to one thread; `kill` to any."""

    def __init__(self, setup: Setup) -> None:
        """Raises: TrialEnded, if the process does not come up; the text says why, for the log."""
        threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MALLOC_ARENA_MAX"), "1")
        self._process = subprocess.Popen(
            # -P: a folder named like one of our packages in the current directory is not what we run
            [sys.executable, "-P", "-m", MODULE, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | threads,
            process_group=0,  # a Ctrl-C in the terminal is the scheduler's to handle
        )
        try:
            error = self._ask(setup, SETUP_SECONDS).error
            if error:
                raise TrialEnded(f"the tokenizer cannot be used for structured output: {error}")
        except TrialEnded:
            self.close()
            raise

    def verdict(self, params: StructuredOutputParams) -> Verdict:
        """Raises: TrialEnded, after which the process is of no use any more."""
        return self._ask(params, WALL_SECONDS)

    def _ask(self, message: Setup | StructuredOutputParams, seconds: float) -> Verdict:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(frames.encode(message))
            self._process.stdin.flush()
        except OSError:
            raise TrialEnded("the trial process has ended") from None
        deadline = time.monotonic() + seconds
        header = self._read(frames.HEADER_BYTES, deadline)
        return frames.decode_verdict(self._read(int.from_bytes(header, "little"), deadline))

    def _read(self, size: int, deadline: float) -> bytes:
        assert self._process.stdout is not None
        pipe, content = self._process.stdout.fileno(), b""
        ready = select.poll()
        ready.register(pipe, select.POLLIN)
        while len(content) < size:
            if not ready.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TrialEnded("the trial process took too long")
            part = os.read(pipe, size - len(content))
            if not part:
                raise TrialEnded("the trial process has ended")
            content += part
        return content

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """Ends it and waits for it."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
