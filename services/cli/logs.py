"""Log formats of all services: one line per message on stderr, as text or as JSON."""

import datetime
import json
import logging
import re
import sys
import time
from typing import Literal

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_ENTRY = re.compile(r"^\S+ \S+ (DEBUG|INFO|WARNING|ERROR|CRITICAL) \S+: (.*)")


class TextFormatter(logging.Formatter):
    """Formats lines as `FORMAT` with less work: the time of a second is formatted once."""

    def __init__(self) -> None:
        super().__init__(FORMAT)
        self._second = -1
        self._text = ""

    def format(self, record: logging.LogRecord) -> str:
        if record.exc_info or record.exc_text or record.stack_info:
            return super().format(record)
        second = int(record.created)
        if second != self._second:
            self._second = second
            self._text = time.strftime(self.default_time_format, self.converter(second))
        return f"{self._text},{int(record.msecs):03d} {record.levelname} {record.name}: {record.getMessage()}"


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object. Members of `extra["fields"]`, or of what it returns if it is a function, are
    members of the object."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created).astimezone()
        fields = record.__dict__.get("fields", {})
        content = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **(fields() if callable(fields) else fields),
        }
        if record.exc_info:
            content["exception"] = self.formatException(record.exc_info)
        return json.dumps(content, ensure_ascii=False)


def configure(level: str, form: Literal["text", "json"] = "text") -> None:
    """Set up the log. DEBUG is that of the services only: a library's is ten thousands of lines, or quotes what it
    reads."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    logging.basicConfig(level="INFO" if level == "debug" else level.upper(), handlers=[handler])
    logging.getLogger("runahead").setLevel(level.upper())


def log_entry(line: str) -> tuple[str, str] | None:
    """Return level and message of a log line, None for any other line."""
    if (content := _json(line)) is not None:
        return str(content.get("level", "")), str(content.get("message", ""))
    match = _ENTRY.match(line)
    return (match[1], match[2]) if match else None


def json_line(service: str, line: str) -> str:
    """Return a service's line as JSON with the name of the service, unless it has one already, and with the time, if it
    is no line of a log."""
    if (content := _json(line)) is None:
        now = datetime.datetime.now().astimezone()
        content = {"time": now.isoformat(timespec="milliseconds"), "message": line}
    return json.dumps({"service": service, **content}, ensure_ascii=False)


def _json(line: str) -> dict[str, object] | None:
    if not line.startswith("{"):
        return None
    try:
        content: dict[str, object] = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content
