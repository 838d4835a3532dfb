"""Log format of all services: one line per message on stderr."""

import logging
import re
import sys

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_ERROR = re.compile(r"^\S+ \S+ (?:ERROR|CRITICAL) \S+: (.*)")


def configure(level: str) -> None:
    logging.basicConfig(stream=sys.stderr, level=level.upper(), format=FORMAT)


def error_text(line: str) -> str | None:
    """Return the message of a log line at level ERROR or above, None for any other line."""
    match = _ERROR.match(line)
    return match[1] if match else None
