"""A pytest plugin that prints the total duration of the tests of each suite (tests/unit, tests/simulation, ...).

Tests that ran at the same time count in full.
"""

from collections import defaultdict
from typing import Any

_seconds: dict[str, float] = defaultdict(float)
_tests: dict[str, set[str]] = defaultdict(set)


def pytest_runtest_logreport(report: Any) -> None:
    suite = "/".join(report.nodeid.split("/")[:2])
    _seconds[suite] += report.duration
    _tests[suite].add(report.nodeid)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.section("time per suite")
    for suite, seconds in _seconds.items():
        terminalreporter.write_line(f"{suite:24} {len(_tests[suite]):6} tests {seconds:9.1f} s")
