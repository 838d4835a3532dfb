import subprocess
import sys
from pathlib import Path

import pytest

from tests.quick import ROOT, chosen, imports_of


def test_tests_nearest_to_a_changed_module_come_first():
    files = chosen(["services/scheduler/core/kv_cache.py"])
    assert files[0] == "tests/unit/scheduler/test_kv_cache.py"
    assert "tests/simulation/test_seeds.py" in files  # through tests/simulation/world.py and the core
    assert not [file for file in files if file.startswith("tests/unit/native")]


@pytest.mark.parametrize(
    ("changed", "test"),
    [
        ("services/cli/convert.py", "tests/unit/cli/test_commands.py"),  # which a command imports when it runs
        ("deploy/compose/gpu.yml", "tests/unit/deploy/test_compose.py"),
        ("services/frontend/page/static/main.js", "tests/unit/frontend/test_page.py"),
        ("tests/unit/protocol/conftest.py", "tests/unit/protocol/test_codec.py"),
    ],
)
def test_every_kind_of_file_has_its_tests(changed: str, test: str):
    assert test in chosen([changed])


def test_members_in_parentheses_are_imports(tmp_path: Path):
    file = tmp_path / "module.py"
    file.write_text("from protocol import (\n    codec,\n    steps as messages,\n)\nimport services.units\n")
    assert imports_of(file) == {"protocol/__init__.py", "protocol/codec.py", "protocol/steps.py", "services/units.py"}


def test_a_run_in_whose_time_no_test_has_run_fails(tmp_path: Path):
    file = tmp_path / "test_slow_to_collect.py"
    file.write_text(
        "import threading\n"
        "next(thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)).function()\n"
        "while True: pass  # until the interpreter sees the signal\n"
    )
    command = [sys.executable, "-m", "tests.quick", "--share", str(file)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    assert run.returncode == 1
    assert b"nothing is known" in run.stdout
