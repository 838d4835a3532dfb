"""Log lines as text and as JSON, and the JSON of `serve`."""

import json
import logging
import sys

import pytest

from services.cli.logs import FORMAT, JsonFormatter, TextFormatter, configure, json_line, log_entry

RECORD = logging.LogRecord("runahead.frontend", logging.INFO, "x.py", 1, "request %s", ("completed",), None)


def test_record_becomes_one_json_object() -> None:
    found = json.loads(JsonFormatter().format(RECORD))
    assert found.pop("time").count(":") >= 2
    assert found == {"level": "INFO", "logger": "runahead.frontend", "message": "request completed"}


def test_text_is_that_of_the_format() -> None:
    ours, theirs = TextFormatter(), logging.Formatter(FORMAT)
    try:
        raise ValueError("two\nlines")
    except ValueError:
        failed = logging.LogRecord("x", logging.ERROR, "x.py", 1, "failed", None, sys.exc_info())
    for record in (RECORD, failed, RECORD):
        for created in (0.0, 0.9994, 1.0, 1795392000.123):
            record.created, record.msecs = created, created % 1 * 1000
            assert ours.format(record) == theirs.format(record)


def test_fields_and_traceback_are_members_of_it() -> None:
    logger, found = logging.getLogger("test-json"), []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(JsonFormatter().format(record))  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        logger.error("x", extra={"fields": {"status": 200}})
        logger.error("x", extra={"fields": lambda: {"status": 200}})
        try:
            raise ValueError("two\nlines")
        except ValueError:
            logger.exception("failed")
    finally:
        logger.removeHandler(handler)
    *lines, failed = found
    assert [json.loads(line)["status"] for line in lines] == [200, 200]
    assert "\n" not in failed
    assert "ValueError: two\nlines" in json.loads(failed)["exception"]


def test_libraries_write_no_debug_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    loggers = logging.root, logging.getLogger("runahead"), logging.getLogger("numba.core")
    levels = [logger.level for logger in loggers]
    configure("debug")
    effective = [logger.getEffectiveLevel() for logger in loggers]
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
    assert effective == [logging.INFO, logging.DEBUG, logging.INFO]


@pytest.mark.parametrize(
    ("line", "entry"),
    [
        ("2026-11-22 10:00:00,000 ERROR runahead: no model", ("ERROR", "no model")),
        ("2026-11-22 10:00:00,000 INFO runahead: fine", ("INFO", "fine")),
        ('{"level": "ERROR", "message": "no model"}', ("ERROR", "no model")),
        ('{"level": "INFO", "message": "fine"}', ("INFO", "fine")),
        ("{not json", None),
        ('{"":' * 100_000, None),
        ("Killed", None),
        ("7", None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_log_lines_are_known_in_both_formats(line: str, entry: tuple[str, str] | None) -> None:
    assert log_entry(line) == entry


def test_lines_of_services_carry_their_name_and_others_are_wrapped() -> None:
    assert json.loads(json_line("worker-1", '{"level": "INFO"}')) == {"service": "worker-1", "level": "INFO"}
    assert json.loads(json_line("serve", json_line("worker", "{}"))) == {"service": "worker"}
    wrapped = json.loads(json_line("worker", "Killed"))
    assert wrapped.pop("time").count(":") >= 2
    assert wrapped == {"service": "worker", "message": "Killed"}
