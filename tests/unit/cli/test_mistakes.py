"""Mistakes of newcomers at the command line: one line that says what to do, before any process is started."""

import importlib.util
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from services.checkpoint import DEMO_MODEL
from services.worker import machine
from tests.unit.cli.command import run_command

DEMO = str(DEMO_MODEL)
MISTAKES: list[tuple[tuple[str, ...], str]] = [
    (("serv",), "No such command 'serv'"),
    (("serve", "/models/llama"), "no such model directory: /models/llama; give a directory"),
    (("serve", "llama.gguf"), "no such model file: llama.gguf"),
    (("serve", "{folder}"), "config.json is missing; give a model directory in Hugging Face format"),
    (("serve", "{other}"), "architecture BertModel is not supported; the native backend computes LlamaForCausalLM"),
    (("serve", DEMO, "--max-model-len", "128K"), "more than the 2048 positions of the model; use --max-model-len 2048"),
    (("serve", DEMO, "--tensor-parallel-size", "3"), "cannot be cut for 3 tensor-parallel ranks, only for 1, 2, 4"),
    (("serve", DEMO, "--pipeline-parallel-size", "9"), "4 layers cannot be cut into 9 pipeline stages"),
    (("serve", DEMO, "--kv-cache-memory-bytes", "1500M"), "of memory that are free; use at most"),
    (("serve", DEMO, "--kv-cache-memory-bytes", "lots"), "--kv-cache-memory-bytes: input should be a valid integer"),
    (("serve", DEMO, "--backend", "vllm"), "--backend vllm needs vllm; docs/vllm.md has the installation"),
    (("serve", DEMO, "--load-format", "gguf"), "--load-format is a setting of --backend vllm"),
    (("serve", DEMO, "--quantization", "awq"), "--quantization awq: --backend native has int8, int4, none"),
    (("serve", DEMO, "--gpu-memory-utilization", "0.9"), "give the size of the KV cache: --kv-cache-memory-bytes 4G"),
    (("serve", DEMO, "--max-modle-len", "512"), "--max-model-len"),
    (("serve", DEMO, "--port", "{port}"), "cannot listen on 127.0.0.1 port {port}: address already in use"),
    (("serve", DEMO, "--port", "80000"), "--port: input should be less than or equal to 65535, not '80000'"),
    (("serve", DEMO, "--host", "192.0.2.1"), "cannot listen on 192.0.2.1 port 8000: cannot assign requested address"),
    (("serve", DEMO, "--enable-auto-tool-choice"), "--enable-auto-tool-choice needs --tool-call-parser"),
    (("serve", DEMO, "--tool-call-parser", "hermse"), "--tool-call-parser: input should be"),
    (("serve", DEMO, "--chat-template", "/no/such.jinja"), "--chat-template: cannot read /no/such.jinja"),
    (("serve", DEMO, "--api-key-file", "/no/such/keys"), "--api-key-file: cannot read /no/such/keys"),
    (("serve", DEMO, "--ssl-keyfile", "key.pem"), "--ssl-keyfile needs --ssl-certfile"),
    (("serve", DEMO, "--config", "{yaml}"), "unknown keys: max-num-seq (max-num-seqs?)"),
    (("serve", DEMO, "--speculative-config", "ngram"), "--speculative-config: is not JSON"),
    (("serve", "--served-model-name", "a", DEMO), "MODEL before --served-model-name"),
    (("serve", "-tp", "2"), "No such option: -tp; use --tensor-parallel-size"),
    (("run-batch", DEMO, "-i", "s3://bucket/in.jsonl", "-o", "out"), "s3://bucket/in.jsonl is no local file"),
]  # fmt: skip


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """Paths that stand in the command lines."""
    folder, other, yaml = tmp_path / "folder", tmp_path / "other", tmp_path / "config.yaml"
    folder.mkdir()
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"architectures": ["BertModel"]}))
    yaml.write_text("max-num-seq: 4\n")
    return {"folder": str(folder), "other": str(other), "yaml": str(yaml)}


@pytest.mark.parametrize(
    ("arguments", "reason"), MISTAKES, ids=lambda value: " ".join(value) if value else ""
)
def test_mistake_is_answered_in_one_line_without_starting_a_process(
    arguments: tuple[str, ...],
    reason: str,
    places: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[object] = []
    monkeypatch.setattr(subprocess.Popen, "__init__", lambda *arguments, **_: started.append(arguments))
    monkeypatch.setattr(machine, "free_memory", lambda: 1 << 30)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find(name))
    with socket.create_server(("127.0.0.1", 0)) as used:
        places["port"] = str(used.getsockname()[1])
        done = run_command(
            capsys, *(argument.format(**places) if "{" in argument else argument for argument in arguments)
        )
    assert (done.status, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("runahead: ")
    assert reason.format(**places) in done.stderr
    assert "Traceback" not in done.stderr
    assert started == []


def test_mistake_in_a_process_of_its_own_imports_no_torch() -> None:
    code = (
        "import sys; from services.cli.app import run\n"
        f"status = run(['serve', {DEMO!r}, '--tensor-parallel-size', '3'])\n"
        "print(status, 'torch' in sys.modules, 'numba' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False", "False"]
