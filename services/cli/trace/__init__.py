"""`runahead trace`: the last steps of a running server as a file for Perfetto."""

import json
import os
import time
from typing import Any

from services.cli.ask import NoAnswer, ServerAddress, about_server, ask_object
from services.cli.settings import ConfigurationError, file_to_write
from services.cli.trace.events import TraceWriter
from services.config.commands import TraceConfig

ENTRIES = 512
"""Entries per request, the server's maximum."""
POLL_SECONDS = 0.5


@about_server
def trace(server: ServerAddress, config: TraceConfig) -> int:
    """Write the file and print what it has. Return the exit status: 0 if it was written, else 1."""
    try:
        file = file_to_write("output", os.path.expanduser(config.output))
    except ConfigurationError as error:
        raise NoAnswer(str(error)) from None
    writer = TraceWriter(collect(server, config.seconds))
    file.write_text(json.dumps(writer.document()))
    hint = "open it in Perfetto" if writer.num_steps else "no request was served in this time"
    print(f"{writer.num_steps} steps (ranks: {writer.num_ranks}) written to {config.output}; {hint}")
    return 0


def collect(server: ServerAddress, seconds: float) -> list[dict[str, Any]]:
    """Return the entries that the server keeps, or those of the next seconds. Raises: NoAnswer"""
    found: list[dict[str, Any]] = []
    ends = time.monotonic() + seconds
    since = 0 if not seconds else _ask(server, 2**53 - 1)["last"]
    while True:
        answer = _ask(server, since)
        found += answer["entries"]
        since = answer["next"]
        if since < answer["last"]:
            continue
        if time.monotonic() >= ends:
            return found
        time.sleep(min(POLL_SECONDS, max(0.0, ends - time.monotonic())))


def _ask(server: ServerAddress, since: int) -> dict[str, Any]:
    """Raises: NoAnswer"""
    return ask_object(server, f"/debug/steps?since={since}&limit={ENTRIES}", "entries", "next", "last")
