"""The forge's files, without the forge: workflows call make and nothing else, and every form can be parsed."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ACTIONS = {"actions/checkout@v5", "actions/setup-python@v6", "actions/upload-artifact@v5"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_targets_of_make_and_nothing_else(path: Path):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for job in yaml.safe_load(path.read_text())["jobs"].values():
        steps = job["steps"]
        assert {step["uses"] for step in steps if "uses" in step} <= ACTIONS
        commands = [step["run"].split() for step in steps if "run" in step]
        assert commands
        for make, target, *variables in commands:
            assert make == "make"
            assert target in targets
            assert all("=" in variable for variable in variables)


def test_forms_ask_at_least_one_required_question():
    forms = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"]
    assert forms
    for path in forms:
        form = yaml.safe_load(path.read_text())
        assert form["name"]
        assert any(item.get("validations", {}).get("required") for item in form["body"])


def test_other_files_for_the_forge_can_be_parsed():
    updates = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text())["updates"]
    assert all((ROOT / update["directory"].lstrip("/")).is_dir() for update in updates)
    owned = [line.split()[0] for line in (ROOT / ".github" / "CODEOWNERS").read_text().splitlines() if line[:1] == "/"]
    assert owned
    assert all((ROOT / path.lstrip("/")).exists() for path in owned)
    assert json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())["postCreateCommand"] == "make setup"


def test_an_environment_without_pip_is_made_again(tmp_path: Path) -> None:
    """Debian's Python makes one if its package for them is missing."""
    for name, code in {".venv/bin/python": "exit 1", "python": 'echo "$@"'}.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\n{code}\n")
        file.chmod(0o700)
    for name in ("pyproject.toml", "deploy/constraints.txt", "deploy/model.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    command = ["make", f"--file={ROOT / 'Makefile'}", "serve", "PYTHON=./python"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "-m venv .venv" in done.stdout.splitlines()
