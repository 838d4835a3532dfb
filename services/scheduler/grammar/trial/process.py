"""A trial process, seen from the scheduler."""

import contextlib
import os
import select
import subprocess
import sys
import time

from protocol.sampling import StructuredOutputParams
from services.scheduler.grammar.limits import SETUP_SECONDS, WALL_SECONDS
from services.scheduler.grammar.trial import messages
from services.scheduler.grammar.trial.messages import TrialSetup, TrialVerdict

MODULE = "services.scheduler.grammar.trial"


class TrialEnded(Exception):
    """The process ended, or was killed, before it answered."""


class TrialProcess:
    """All methods belong to one thread, except `kill`, which any thread may call."""

    def __init__(self, setup: TrialSetup) -> None:
        """Start the process and wait until it has read the tokenizer.

        Raises: TrialEnded, if it does not start; the text, for the log, gives the reason.
        """
        threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MALLOC_ARENA_MAX"), "1")
        self._process = subprocess.Popen(
            # -P: do not import from the current directory, which may hold a folder with the name of our packages
            [sys.executable, "-P", "-m", MODULE, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | threads,
            process_group=0,  # only the scheduler handles Ctrl-C from the terminal
        )
        try:
            error = self._request(setup, SETUP_SECONDS).error
            if error:
                raise TrialEnded(f"the tokenizer cannot be used for structured output: {error}")
        except TrialEnded:
            self.close()
            raise

    def verdict(self, params: StructuredOutputParams) -> TrialVerdict:
        """Raises: TrialEnded; the process cannot be used afterwards."""
        return self._request(params, WALL_SECONDS)

    def _request(self, message: TrialSetup | StructuredOutputParams, seconds: float) -> TrialVerdict:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(messages.encode(message))
            self._process.stdin.flush()
        except OSError:
            raise TrialEnded("the trial process has ended") from None
        deadline = time.monotonic() + seconds
        header = self._read(messages.HEADER_BYTES, deadline)
        return messages.decode_verdict(self._read(int.from_bytes(header, "little"), deadline))

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
        """End the process and wait for its end."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
