"""The tests that tell soonest whether an edit holds: `make quick`, or `python -m tests.quick [COMMIT]`.

Chooses test files by imports: the fewer imports lie between a test file and a changed module, the earlier it runs, and
of two at the same distance the one that imports less. A conftest.py counts as imported by the tests of its folder, and
`READERS` has the tests of files that are no modules. The run ends after `SECONDS`; `make test` runs everything.

Changed are the files that differ from COMMIT, by default from the last commit; if none does, those of the last commit.
"""

import os
import re
import signal
import subprocess
import sys
import threading
from collections import defaultdict, deque
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 50
"""Time for the tests. Linting the changed files and choosing take the rest of a minute."""
PROCESSES = 2
RUFF = Path(sys.executable).parent / "ruff"
SUITES = ("tests/unit", "tests/simulation")
ALWAYS = ("tests/unit/test_docs.py",)
LOOP = "tests/simulation/test_loop.py"
"""The core with random workloads, which runs for every change to it."""
CORE = ("protocol/", "services/scheduler/")
DEPLOYED = "tests/unit/deploy/*.py"
READERS = {
    "services/frontend/page/": "tests/unit/frontend/test_page.py", "deploy/": DEPLOYED, "docker-compose.yml": DEPLOYED,
    ".github/": DEPLOYED, ".devcontainer/": DEPLOYED, "Makefile": DEPLOYED, "pyproject.toml": DEPLOYED,
}  # fmt: skip
"""Tests that read files, by the beginnings of their paths."""
_IMPORT = re.compile(
    r"^\s*(?:from ((?:protocol|services|tests)[\w.]*) import ([^#\n]+)|import ((?:protocol|services|tests)[\w.]*))",
    re.M,
)
_LATER = re.compile(r'"(services(?:\.\w+)+)(?::\w+)?"')
"""The name of a module that a command imports when it runs."""
_PARENTHESES = re.compile(r"\(([^)]*)\)")


def git(*words: str) -> list[str]:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()


def changed_files(commit: str) -> list[str]:
    """Return the paths of files that differ from a commit, new ones included; else those of the last commit."""
    changed = git("diff", "--name-only", commit) + git("ls-files", "--others", "--exclude-standard")
    return changed or git("diff", "--name-only", "HEAD~1")


def imports_of(path: Path) -> set[str]:
    """Return the paths of our own modules that a file imports."""
    text = _PARENTHESES.sub(lambda match: match.group(1).replace("\n", " "), path.read_text(encoding="utf-8"))
    names = set(_LATER.findall(text))
    for package, members, module in _IMPORT.findall(text):
        names.add(module or package)
        names |= {f"{package}.{member.split()[0]}" for member in members.split(",") if member.split()}
    paths = (name.replace(".", "/") for name in names)
    return {found for path in paths for found in (f"{path}.py", f"{path}/__init__.py") if (ROOT / found).is_file()}


@cache
def imports_of_all() -> dict[str, set[str]]:
    """Return for each of our files what it imports."""
    files = git(
        "ls-files", "--cached", "--others", "--exclude-standard", "protocol/*.py", "services/*.py", "tests/*.py"
    )
    return {file: imports_of(ROOT / file) for file in files if (ROOT / file).is_file()}


def chosen(changed: list[str]) -> list[str]:
    """Return the test files that reach a changed file by imports, nearest first."""
    imports, importers = imports_of_all(), defaultdict[str, set[str]](set)
    for file, imported in imports.items():
        for module in imported:
            importers[module].add(file)
    for file in changed:
        folder, _, name = file.rpartition("/")
        readers = [tests for start, tests in READERS.items() if file.startswith(start) and not file.endswith(".py")]
        if name == "conftest.py":
            readers.append(f"{folder}/**/test_*.py")
        importers[file] |= {str(path.relative_to(ROOT)) for tests in readers for path in ROOT.glob(tests)}
    distance = dict.fromkeys(changed, 0)
    queue = deque(changed)
    while queue:
        file = queue.popleft()
        for importer in importers[file] - distance.keys():
            distance[importer] = distance[file] + 1
            queue.append(importer)
    tests = [file for file in distance if file.startswith(SUITES) and Path(file).name.startswith("test_")]
    tests = [file for file in tests if (ROOT / file).is_file()]
    return sorted(tests, key=lambda file: (distance[file], len(imports.get(file, ())), file))


class EndInTime:
    """Ends a run of pytest after a number of seconds, in the middle of a test if need be, without a failure."""

    def __init__(self) -> None:
        self.files = set[str]()
        """Files of which a test has run."""
        self.is_over = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.files.add(report.nodeid.partition("::")[0])

    def interrupt(self) -> None:
        self.is_over = True
        os.kill(os.getpid(), signal.SIGINT)  # not an alarm, which pytest-timeout sets for each test


def run_share(tests: list[str]) -> int:
    """Run test files in this process until the time is over."""
    limit = EndInTime()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background command ignores it
    timer = threading.Timer(SECONDS, limit.interrupt)
    timer.start()
    status = pytest.main(["--exitfirst", "--no-header", "-p", "no:cacheprovider", *tests], plugins=[limit])
    timer.cancel()
    print(f"{len(limit.files)} of {len(tests)} test files have run")
    if status == pytest.ExitCode.INTERRUPTED and limit.is_over and not limit.files:
        print("this machine was too busy for a single test: nothing is known; repeat it, or run `make test`")
        return 1
    return 0 if status == pytest.ExitCode.INTERRUPTED and limit.is_over else int(status)


def main(commit: str = "HEAD") -> int:
    changed = changed_files(commit)
    python = [file for file in changed if file.endswith(".py") and (ROOT / file).is_file()]
    if python and (status := subprocess.run([RUFF, "check", "--quiet", *python], cwd=ROOT, check=False).returncode):
        return status
    tests = [*ALWAYS, *chosen(changed)]
    if any(file.startswith(CORE) for file in changed):
        tests.insert(1, LOOP)
    tests = list(dict.fromkeys(tests))
    print(f"{len(changed)} files have changed; {len(tests)} test files reach them; {SECONDS} s for the nearest")
    shares = [tests[number::PROCESSES] for number in range(PROCESSES)]
    command = [sys.executable, "-m", "tests.quick", "--share"]
    runs = [subprocess.Popen([*command, *share], cwd=ROOT) for share in shares if share]
    return max(run.wait() for run in runs)


if __name__ == "__main__":
    words = sys.argv[1:]
    sys.exit(run_share(words[1:]) if words[:1] == ["--share"] else main(*words))
