"""Commands with their exit status and output. Those that do not start a service run in this process."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from services.checkpoint import DEMO_MODEL
from services.cli.command_help import ORDER
from services.cli.flags_of_others import HINTS
from services.config import OMITTED, ServeConfig
from tests.unit.cli.command import run_command, run_process

Capture = pytest.CaptureFixture[str]


def test_every_setting_of_serve_is_a_flag_with_its_default(capsys: Capture) -> None:
    text = " ".join(run_command(capsys, "serve", "--help").stdout.split())
    for name, info in ServeConfig.model_fields.items():
        flag = "--" + name.replace("_", "-")
        assert (f" {flag} " in text) == (name not in OMITTED), flag
        if name in OMITTED or info.default in (None, "") or info.default_factory:
            continue
        entry = text[text.index(f" {flag} ") :].partition("]")[0]
        value = ("on" if info.default else "off") if type(info.default) is bool else info.default
        assert entry.endswith(f"[default: {value}")


def test_a_flag_takes_several_values_and_underscores_as_in_vllm(capsys: Capture) -> None:
    adapters = ("--backend", "vllm", "--enable-lora", "--lora-modules", "x=a", "y=b")
    done = run_command(capsys, "config", "show", "a-model", *adapters, "--served_model_name", "a", "b", "--port", "1")
    assert 'served-model-name: ["a", "b"]  # flag' in done.stdout
    assert 'lora-modules: ["x=a", "y=b"]  # flag' in done.stdout
    assert 'model: "a-model"  # flag' in done.stdout


def test_help_has_groups_with_common_options_first_and_the_simulator_last(capsys: Capture) -> None:
    text = run_command(capsys, "serve", "-h").stdout
    titles = [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == ["Arguments:", *(f"{title}:" for title in ORDER)]
    assert text.index("--port") < text.index("\nAPI:") < text.index("--batching-policy") < text.index("--sim-step-ms")


def test_hints_are_for_flags_that_do_not_exist() -> None:
    known = {"--" + name.replace("_", "-") for name in ServeConfig.model_fields}
    for flag, text in HINTS.items():
        assert flag not in known
        assert set(re.findall(r"--[a-z-]+", text)) <= known | {f"--no-{name[2:]}" for name in known}


def test_config_show_prints_a_file_that_config_accepts(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "first.yaml"
    file.write_text("block-size: 32\nserved-model-name: [x, y]\n")
    arguments = ("--config", str(file), "--no-enable-prefix-caching", "--port", "8123")
    with monkeypatch.context() as environment:
        environment.setenv("RUNAHEAD_MAX_NUM_SEQS", "9")
        first = run_command(capsys, "config", "show", *arguments)
    assert first.status == 0, first.stderr
    lines = dict(line.split(": ", 1) for line in first.stdout.splitlines())
    assert lines["block-size"] == f"32  # file {file}"
    assert lines["port"] == "8123  # flag --port"
    assert lines["max-num-seqs"] == "9  # environment RUNAHEAD_MAX_NUM_SEQS"
    assert lines["enable-prefix-caching"] == "false  # flag --enable-prefix-caching"
    assert lines["dtype"] == '"auto"  # default'
    again = tmp_path / "again.yaml"
    again.write_text(first.stdout)
    second = run_command(capsys, "config", "show", "--config", str(again))
    assert second.status == 0, second.stderr
    assert yaml.safe_load(second.stdout) == yaml.safe_load(first.stdout)


def test_config_show_prints_what_follows_from_model_and_machine(capsys: Capture) -> None:
    drafts = '{"method": "ngram", "num_speculative_tokens": 3}'
    done = run_command(capsys, "config", "show", str(DEMO_MODEL), "--speculative-config", drafts, "--threads", "3")
    assert f"speculative-config: {drafts}  # flag --speculative-config\n" in done.stdout
    resolved = dict(line[2:-12].split(": ", 1) for line in done.stdout.splitlines() if line.endswith("  # resolved"))
    assert resolved.pop("kv-cache-memory-bytes").isdigit()
    assert resolved == {
        "batching-policy": '"chunked"', "batch-queue-depth": "2", "served-model-name": '["demo_model"]',
        "max-model-len": "2048", "dtype": '"float32"',
    }  # fmt: skip


def test_config_show_prints_no_secrets(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNAHEAD_API_KEY", "sesame,open")
    done = run_command(capsys, "config", "show")
    assert "sesame" not in done.stdout
    assert "# api-key: 2 not shown  # environment RUNAHEAD_API_KEY" in done.stdout


def test_version_is_that_of_the_distribution(capsys: Capture) -> None:
    from importlib.metadata import version

    assert run_command(capsys, "--version").stdout == f"runahead {version('runahead-engine')}\n"


def test_command_line_without_arguments_lists_the_commands() -> None:
    done = run_process()
    assert done.status == 0
    for command in ("serve", "frontend", "scheduler", "worker", "bench", "config"):
        assert f"\n  {command}" in done.stdout


@pytest.mark.parametrize("service", ["frontend", "scheduler"])
def test_frontend_and_scheduler_load_neither_torch_nor_transformers(service: str) -> None:
    code = (
        f"import json, sys, services.{service}.service, services.cli.child, services.cli.app\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *_, modules = done.stdout.splitlines()  # behind the phases of the start
    assert not {"torch", "transformers", "vllm", "xgrammar"} & set(json.loads(modules))


def test_capabilities_prints_each_reason_of_a_refusal_once(capsys: Capture) -> None:
    from services.scheduler.capabilities import table

    _, _, *refused = run_command(capsys, "capabilities").stdout.splitlines()
    assert sorted(refused) == sorted({f"- {reason}" for _, reason in table() if reason})


def test_ctrl_c_during_the_imports_prints_no_traceback() -> None:
    code = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell inherits that it is ignored
from services.cli import main

class Interrupting:
    def find_spec(self, name, *_):
        if name == "services.cli.app":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")
