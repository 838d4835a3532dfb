"""The command line as a user meets it: a process, its exit status and its lines."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from services.config import ENDPOINTS, ServeConfig


def runahead(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RUNAHEAD_")}
    return subprocess.run(
        [sys.executable, "-m", "services.cli", *arguments],
        env={**clean, "COLUMNS": "200", **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_every_setting_of_serve_is_a_flag_with_its_default() -> None:
    text = " ".join(runahead("serve", "--help").stdout.split())
    for name, info in ServeConfig.model_fields.items():
        flag = "--" + name.replace("_", "-")
        assert (f" {flag} " in text) == (name not in ENDPOINTS), flag
        if name in ENDPOINTS or info.default in (None, "") or info.default_factory:
            continue
        entry = text[text.index(f" {flag} ") :].partition("]")[0]
        value = ("on" if info.default else "off") if type(info.default) is bool else info.default
        assert entry.endswith(f"[default: {value}")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["serve", "--no-async-scheduling", "--batch-queue-depth", "2"], "contradicts --batch-queue-depth 2"),
        (["serve", "--max-num-seqs", "many"], "--max-num-seqs: input should be a valid integer"),
        (["serve", "--no-such-parallel-size", "2"], "No such option: --no-such-parallel-size"),
        (["serve", "--max-num-seqs"], "requires an argument"),
        (["serve", "/no/such/model"], "no such model directory: /no/such/model; give a directory"),
        (["serve", "a-model", "--model", "another"], "'a-model' contradicts --model 'another'"),
        (["scheduler", "--config", "/no/such/file"], "cannot read the configuration file /no/such/file"),
        (["bench", "--base-url", "localhost:80"], "--base-url"),
        (["bench", "--random-id-low", "9", "--random-id-high", "9"], "--random-id-high 9 must be above"),
        (["sing"], "No such command 'sing'"),
    ],
)
def test_wrong_command_line_exits_2_with_one_line(arguments: list[str], reason: str) -> None:
    done = runahead(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert reason in done.stderr
    assert done.stderr.startswith("runahead: ")
    assert done.stderr.count("\n") == 1


def test_service_with_an_endpoint_it_may_not_bind_says_so() -> None:
    done = runahead("scheduler", "--worker-endpoint", "tcp://0.0.0.0:5555")
    assert done.returncode == 1
    assert "--worker-endpoint: tcp://0.0.0.0:5555: services speak unencrypted" in done.stderr
    assert "Traceback" not in done.stderr


def test_config_show_prints_a_file_that_config_accepts(tmp_path: Path) -> None:
    file = tmp_path / "first.yaml"
    file.write_text("block-size: 32\nserved-model-name: [x, y]\n")
    arguments = ("--config", str(file), "--no-enable-prefix-caching", "--port", "8123")
    first = runahead("config", "show", *arguments, RUNAHEAD_MAX_NUM_SEQS="9")
    assert first.returncode == 0, first.stderr
    lines = dict(line.split(": ", 1) for line in first.stdout.splitlines())
    assert lines["block-size"] == f"32  # file {file}"
    assert lines["port"] == "8123  # flag --port"
    assert lines["max-num-seqs"] == "9  # environment RUNAHEAD_MAX_NUM_SEQS"
    assert lines["enable-prefix-caching"] == "false  # flag --enable-prefix-caching"
    assert lines["dtype"] == '"auto"  # default'
    again = tmp_path / "again.yaml"
    again.write_text(first.stdout)
    second = runahead("config", "show", "--config", str(again))
    assert second.returncode == 0, second.stderr
    assert yaml.safe_load(second.stdout) == yaml.safe_load(first.stdout)


def test_config_show_keeps_secrets() -> None:
    done = runahead("config", "show", RUNAHEAD_API_KEY="sesame,open")
    assert "sesame" not in done.stdout
    assert "# api-key: 2 not shown  # environment RUNAHEAD_API_KEY" in done.stdout


def test_version_is_the_package_s() -> None:
    from importlib.metadata import version

    assert runahead("--version").stdout == f"runahead {version('runahead')}\n"


def test_no_arguments_list_the_commands() -> None:
    done = runahead()
    assert done.returncode == 0
    for command in ("serve", "frontend", "scheduler", "worker", "bench", "config"):
        assert f"\n  {command}" in done.stdout


@pytest.mark.parametrize("service", ["frontend", "scheduler"])
def test_frontend_and_scheduler_load_neither_torch_nor_transformers(service: str) -> None:
    code = (
        f"import json, sys, services.{service}.service, services.cli.child, services.cli.app\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "vllm", "xgrammar"} & set(json.loads(done.stdout))


def test_capabilities_prints_every_combination_and_why_one_is_refused() -> None:
    from services.scheduler.capabilities import table

    lines = runahead("capabilities").stdout.splitlines()
    assert len(lines) == len(list(table()))
    assert any("chunked" in line and "refused: a rigid device cannot mix" in line for line in lines)
    assert any(line.endswith("works") for line in lines)
