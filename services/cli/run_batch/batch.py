"""A batch file from its first line to its last."""

import asyncio
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from services.cli.ask import ServerAddress
from services.cli.run_batch.lines import BatchRefusal, BatchRequest, parse, result_line
from services.cli.run_batch.requests import RequestSender, ServerGone

WINDOW = 16
"""Lines that are read ahead, for each request that may be open: a slow one holds back only the output."""
REPORT_SECONDS = 10.0
"""Seconds between two lines about the progress."""


class Batch:
    """Reads requests, sends up to `concurrency` of them at a time, and writes answers in the order of the input."""

    def __init__(self, source: Path, target: Path, concurrency: int) -> None:
        self.num_written = 0
        self.num_errors = 0
        """Lines without an answer of status 200."""
        self.ended = False
        """The whole input was answered."""
        self.error = ""
        """Reason why a file could not be read or written, or the server was lost."""
        self.server_ended = threading.Event()
        """Set it when the server is not started again."""
        self._source = source
        self._target = target
        self._concurrency = concurrency
        self._reported = 0.0

    async def run(self, server: ServerAddress, socket: str | None = None) -> None:
        """Answer all lines, or stop at the first one that gets no answer: `error` has the reason."""
        self._reported = time.monotonic()
        sender = RequestSender(server, socket, self._concurrency, self.server_ended)
        pending: deque[asyncio.Task[tuple[str, bool]]] = deque()
        try:
            # A half of a surrogate pair, as in a custom_id, becomes its escape, which is the same in JSON
            with self._target.open("w", 1, encoding="utf-8", errors="backslashreplace") as output:
                await self._run(sender, pending, output)
            self.ended = True
        except ServerGone as error:
            self.error = str(error)
        except OSError as error:
            self.error = f"{error.filename or self._target}: {error.strerror or error}"
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
            await sender.close()

    async def _run(
        self, sender: RequestSender, pending: "deque[asyncio.Task[tuple[str, bool]]]", output: TextIO
    ) -> None:
        """Raises: OSError, ServerGone"""
        for line in self._lines():
            pending.append(asyncio.create_task(_answer(sender, line)))
            await asyncio.sleep(0)
            while pending and (len(pending) >= WINDOW * self._concurrency or pending[0].done()):
                self._write(output, *await pending[0])
                pending.popleft()
        while pending:
            self._write(output, *await pending[0])
            pending.popleft()

    def _lines(self) -> Iterator[BatchRequest | BatchRefusal]:
        """Raises: OSError, naming the file"""
        used: dict[str, int] = {}
        try:
            with self._source.open("rb") as file:
                for number, text in enumerate(file, 1):
                    if text.strip():
                        yield parse(text, used, number)
        except OSError as error:
            error.filename = str(self._source)
            raise

    def _write(self, output: TextIO, line: str, is_error: bool) -> None:
        output.write(line)
        self.num_written += 1
        self.num_errors += is_error
        if time.monotonic() - self._reported > REPORT_SECONDS:
            self._reported = time.monotonic()
            print(f"{self.num_written} lines answered", file=sys.stderr, flush=True)


async def _answer(sender: RequestSender, line: BatchRequest | BatchRefusal) -> tuple[str, bool]:
    """Return a line of the output, and whether it has an error. Raises: ServerGone"""
    if isinstance(line, BatchRefusal):
        return result_line(line.custom_id, None, {"code": line.code, "message": line.message}), True
    response = await sender.send(line)
    return result_line(line.custom_id, response), response["status_code"] != 200
