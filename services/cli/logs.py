"""How every service writes its log: one line per message on stderr."""

import logging
import re
import sys

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_ERROR = re.compile(r"^\S+ \S+ (?:ERROR|CRITICAL) \S+: (.*)")


def configure(level: str) -> None:
    logging.basicConfig(stream=sys.stderr, level=level.upper(), format=FORMAT)


def error_text(line: str) -> str | None:
    """The message of a line that reports an error, None for every other line."""
    match = _ERROR.match(line)
    return match[1] if match else None
