"""Mistakes of newcomers at the command line: one line that says what to do, before any process is started."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from services.checkpoint import DEMO_MODEL
from services.cli import serving_memory
from services.cli.model_check import check_sizes
from services.cli.settings import ConfigurationError
from services.config import ServeConfig
from services.worker import gpus, machine
from tests.certificates import AUTHORITY, KEY, TLS
from tests.unit.cli.command import run_command

DEMO = str(DEMO_MODEL)
SIM = ("serve", "--backend", "sim", "--sim-vocab-size", "100")
LEAVES = "is not on this machine alone, and what is published is not encrypted; set --insecure-transport"
INDEX = "model.safetensors.index.json"
DRAFTER = '{"method": "eagle", "model": "/no/such", "num_speculative_tokens": 2}'


def kv_events(**settings: object) -> tuple[str, ...]:
    return (*SIM, "--kv-events-config", json.dumps({"enable_kv_cache_events": True, **settings}))


MISTAKES: list[tuple[tuple[str, ...], str]] = [
    (("serv",), "No such command 'serv'. Did you mean 'serve'?\n"),
    (("run", "llama.gguf"), "No such command 'run'; use `runahead serve MODEL`, then the page"),
    (("list",), "No such command 'list'; use `runahead status`"),
    (("serve", "/models/llama"), "no such model directory: /models/llama; give a directory"),
    (("serve", "llama.gguf"), "no such model file: llama.gguf"),
    (("serve", "{folder}"), "config.json is missing; give a model directory in Hugging Face format"),
    (("serve", "{other}"), "Llama4ForCausalLM; try --backend vllm (docs/vllm.md)"),
    (("serve", DEMO, "--max-model-len", "128K"), "more than the 2048 positions of the model; use --max-model-len 2048"),
    (("plan", DEMO, "--max-model-len", "4096"), "more than the 2048 positions of the model"),
    (("serve", DEMO, "--tensor-parallel-size", "3"), "cannot be cut for 3 tensor-parallel ranks, only for 1, 2, 4"),
    (("serve", DEMO, "--pipeline-parallel-size", "9"), "4 layers cannot be cut into 9 pipeline stages"),
    (("serve", DEMO, "--prefill-engines", "1"), "of --data-parallel-size 1 leaves no engine that decodes"),
    (("serve", DEMO, "--role", "prefill"), "--role is for one engine beside others; serve has --prefill-engines"),
    (
        ("serve", DEMO, "--headless", "--client-endpoint", "ipc:///tmp/x", "--role", "decode"),
        "--role decode: engines load each other's KV blocks; give --kv-peer-address",
    ),
    (("ray", DEMO, "--prefill-engines", "1"), "--prefill-engines"),
    (("serve", DEMO, "--threads", "100000"), f"--threads 100000: this machine has {os.cpu_count()} processors; use at"),
    (("serve", DEMO, "--kv-cache-memory-bytes", "1500M"), "of memory are free; use at most"),
    (("serve", DEMO, "--device", "cuda"), "is a build for CPUs; install a CUDA build of torch"),
    (("serve", DEMO, "--device", "cuda", "--tensor-parallel-size", "2"), "--device cuda computes on one GPU so far"),
    (("serve", DEMO, "--device", "cuda", "--quantization", "int8"), "use --quantization none"),
    (("serve", DEMO, "--device", "cuda", "--batch-invariant"), "--batch-invariant is a promise of --device cpu"),
    (("serve", DEMO, "--device", "cpu", "--gpu-memory-utilization", "0.5"), "is for GPUs; --device cpu does not use"),
    (("serve", DEMO, "--gpu-memory-utilization", "0.5"), "is for GPUs, and this machine has none"),
    (("serve", DEMO, "--enforce-eager"), "--enforce-eager is for GPUs, and this machine has none"),
    (("serve", DEMO, "--device", "cuda", "--backend", "vllm"), "--backend vllm needs vllm"),
    (("serve", DEMO, "--device", "cuda", "--backend", "sim"), "--device is a setting of --backend native and vllm"),
    (("serve", DEMO, "--backend", "vllm", "--gpu-memory-utilization", "0.5"), "is for GPUs; --device auto does not"),
    (("serve", DEMO, "--gpu-memory-utilization", "1.5"), "--gpu-memory-utilization: input should be less than"),
    (("serve", DEMO, "--kv-cache-memory-bytes", "lots"), "must be a number, such as 8192, 8K or 4G, not 'lots'"),
    (("serve", DEMO, "--backend", "vllm"), "--backend vllm needs vllm; docs/vllm.md has the installation"),
    (("serve", DEMO, "--load-format", "gguf"), "--load-format is a setting of --backend vllm"),
    (("serve", DEMO, "--quantization", "awq"), "--quantization awq: --backend native has int8, int4, none"),
    (("serve", DEMO, "--mem_fraction_static", "0.9"), "use --gpu-memory-utilization, or --kv-cache-memory-bytes 4G"),
    (("serve", DEMO, "--max-modle-len", "512"), "--max-model-len"),
    (("serve", DEMO, "--port", "{port}"), "cannot listen on 127.0.0.1 port {port}: address already in use"),
    (("serve", DEMO, "--port", "80000"), "--port: input should be less than or equal to 65535, not '80000'"),
    (("serve", DEMO, "--host", "192.0.2.1"), "cannot listen on 192.0.2.1 port 8000: cannot assign requested address"),
    (
        ("serve", DEMO, "--enable-auto-tool-choice", "--tool-call-parser", "none"),
        "--enable-auto-tool-choice needs a format of calls",
    ),
    (("serve", DEMO, "--tool-call-parser", "hermse"), "--tool-call-parser: input should be"),
    (("serve", DEMO, "--chat-template", "~no-user/x"), "--chat-template: cannot read ~no-user/x"),
    (("serve", DEMO, "--kv-offload-dir", "{yaml}"), "--kv-offload-dir {yaml}: File exists"),
    (("serve", DEMO, "--kv-offload-dir", "{folder}"), "chmod 700 it, or give a directory of this user"),
    (("serve", DEMO, "--kv-peer-address", "here"), "--kv-peer-address: 'here' is not an endpoint: use ipc://PATH or"),
    (("serve", DEMO, "--api-key", ""), "--api-key: a key is empty; give a key, or leave the setting out"),
    (("serve", "{weightless}"), "has no safetensors files; convert its .bin files"),
    (("serve", "{incomplete}"), "has no model-2.safetensors, which its index names; download the model again"),
    (("serve", "{pointer}"), "model.safetensors is a pointer of Git LFS, not the file; run `git lfs pull` in its"),
    (("serve", "{pointer.gguf}"), "pointer.gguf is a pointer of Git LFS, not the file"),
    (("serve", "{pointers}"), "model-2.safetensors is a pointer of Git LFS"),
    (("serve", "{pointed-config}"), "config.json is a pointer of Git LFS, not the file"),
    (("serve", "{pointed-index}"), "model.safetensors.index.json is a pointer of Git LFS, not the file"),
    (("serve", "{unread}"), "model.safetensors cannot be read: Is a directory"),
    (("serve", "{cut}"), "model-2.safetensors is not a valid safetensors file ("),
    (("serve", "{wordless}"), "has no tokenizer.json; name another tokenizer with --tokenizer"),
    (("serve", "{page}"), "tokenizer.json is damaged or cut off; download it again"),
    (("serve", "{words}"), "tokenizer.json is a pointer of Git LFS"),
    (("serve", "{half}"), "tokenizer.json is damaged or cut off; download it again"),
    (("serve", DEMO, "--allowed-origins", "chat.example.com"), "'chat.example.com' is no origin, which is SCHEME://"),
    (("serve", DEMO, "--allowed-origins", "https://a.com/"), "'https://a.com/' is no origin, which is SCHEME://HOST"),
    (("serve", DEMO, "--allowed-hosts", "https://a.com"), "'https://a.com' is no host name such as llm.example.com"),
    (("serve", DEMO, "--allowed-hosts", "a.com:8000"), "it has no scheme and no port"),
    (("serve", DEMO, "--tokenizer", "~no-user/such"), "--tokenizer: no such model directory: ~no-user/such"),
    (("serve", "my model"), "model my model: no such directory, and not a name on the hub"),
    (("serve", DEMO, "--chat-template", "{broken}"), "line 2: Unexpected end of template"),
    (("serve", DEMO, "--batching-policy", "clever"), "--batching-policy clever: there is no such policy; choose one"),
    (("serve", DEMO, "--speculative-config", DRAFTER), "--speculative-config: no such model directory: /no/such"),
    (("serve", DEMO, "--kv-cache-memory-bytes", "1k"), "1000 bytes hold no KV block; one takes"),
    (("serve", DEMO, "--uds", "{yaml}"), "--uds: {yaml} is a file; give a path that a socket can have"),
    (("serve", DEMO, "--uds", ""), "--uds: '' is no path of 1 to"),
    (("serve", DEMO, "--uds", f"/tmp/{'x' * 120}"), "bytes, as a socket needs"),
    (("status", "http://a", "--url", "http://b"), "'http://a' contradicts --url 'http://b'"),
    (("bench", "http://a", "--url", "http://b"), "'http://a' contradicts --base-url 'http://b'"),
    (("serve", DEMO, "--otlp-traces-endpoint", "http://a:4318/v1/traces"), "grpc takes no path; set OTEL_"),
    (("bench", "--base-url", "http://"), "--base-url: string should match pattern"),
    (("bench", "http://[::1"), "http://[::1 is no URL of a server; give one such as http://127.0.0.1:8000"),
    (("bench", "http://host:80000"), "http://host:80000 is no URL of a server"),
    (("bench", "http://a..b"), "no server answers at http://a..b: "),
    (("serve", DEMO, "--uds", "/no/such/socket"), "--uds: /no/such/socket is no path of a file"),
    (("serve", DEMO, "--step-trace", "{folder}"), "--step-trace: {folder} is no path of a file"),
    (("serve", DEMO, "--record-tokens"), "--record-tokens needs --record DIR"),
    (("serve", DEMO, "--record", ""), "--record: "),
    (("replay",), "runahead replay DIR"),
    (("replay", "{folder}"), "contains no recording"),
    (("serve", DEMO, "--ssl-keyfile", "key.pem"), "--ssl-keyfile needs --ssl-certfile"),
    (("serve", DEMO, "--ssl-certfile", "missing.pem"), "--ssl-certfile: cannot use missing.pem: no such file"),
    (("serve", DEMO, "--ssl-certfile", AUTHORITY, "--ssl-keyfile", KEY), "key values mismatch"),
    (("serve", DEMO, *TLS, "--ssl-ca-certs", KEY), "--ssl-ca-certs: cannot use"),
    (("serve", DEMO, "--root-path", "llm"), "--root-path"),
    (("serve", DEMO, "--config", "{yaml}"), "unknown keys: max-num-seq (max-num-seqs?)"),
    (("serve", DEMO, "--config", "{switch}"), "max-num-seqs is true, and this setting is no switch; give its value"),
    (("serve", DEMO, "--host", ""), "--host: string should have at least 1 character"),
    (("serve", DEMO, "--speculative-config", "{}"), "--speculative-config: method: field required"),
    (("serve", DEMO, "--speculative-config", "ngram"), "--speculative-config: is not JSON"),
    (("serve", "--served-model-name", "a", DEMO), "MODEL before --served-model-name"),
    (("serve", "-tp", "2"), "No such option: -tp; use --tensor-parallel-size"),
    (("serve", "--no-trust-remote-code"), "No such option: --no-trust-remote-code; leave it out"),
    (("serve", "--speculative-config.method", "ngram"), "--speculative-config.method; use --speculative-config"),
    (("serve", "--override-generation-config", '{"max_new_tokens": 0}'), "max_new_tokens must be at least 1"),
    (("serve", "--override-generation-config", '{"seed": 1}'), "seed has no default, only temperature, top_p"),
    (("serve", "--override-generation-config", '{"top_p": 7}'), "top_p must be above 0 and at most 1"),
    (("serve", "--no-such-parallel-size", "2"), "No such option: --no-such-parallel-size (Possible options: --data-"),
    (("serve", "--aggregate-engine-logging"), "--aggregate-engine-logging; --help lists all, docs/for-vllm.md"),
    (("serve", "--max-num-seqs"), "requires an argument"),
    (("serve", "a-model", "--model", "another"), "'a-model' contradicts --model 'another'"),
    (("scheduler", "--config", "/no/such/file"), "cannot read the configuration file /no/such/file"),
    (("bench", "--random-id-low", "9", "--random-id-high", "9"), "--random-id-high 9 must be above"),
    (("run-batch", DEMO, "-i", "~no-user/in.jsonl", "-o", "out"), "there is no file ~no-user/in.jsonl"),
    (("run-batch",), "run-batch needs --input-file FILE"),
    (("run-batch", "-i", "in.jsonl"), "run-batch needs --output-file FILE"),
    (("run-batch", "-i", "https://host/in", "-o", "out"), "--input-file: https://host/in is no local file"),
    (("run-batch", "-i", __file__, "-o", "/no/such/out"), "--output-file: /no/such/out is no path of a file"),
    (("run-batch", "-i", __file__, "-o", __file__), "is the input file"),
    (
        ("run-batch", "-i", __file__, "-o", "/tmp/out", "--url", "http://127.0.0.1:1"),
        "--url: no server answers at http://127.0.0.1:1",
    ),
    (("ray", "--headless"), "--headless: an application on Ray does not have this setting"),
    (("ray", "--record", "/tmp/x"), "--record: an application on Ray does not have this setting"),
    (("run-batch", "--port", "80"), "No such option: --port"),
    (("serve", "--max-num-seqs", "many"), "--max-num-seqs: input should be a valid integer"),
    (("serve", "--dtype", "int8"), "'auto', 'float32' or 'bfloat16', not 'int8'"),
    (("serve", "--sim-step-ms", "inf"), "--sim-step-ms: input should be a finite number"),
    (("serve", "--tensor-parallel-size", "two"), "--tensor-parallel-size: input should be 'auto' or a valid integer"),
    (("serve", "--tensor-parallel-size", "auto"), "serve starts the workers and needs a number"),
    (("serve", "--no-async-scheduling", "--batch-queue-depth", "2"), "--no-async-scheduling contradicts"),
    (("serve", "--async-scheduling", "--batch-queue-depth", "1"), "--async-scheduling contradicts"),
    (("serve", "--backend", "vllm", "--lora-modules", "a=b"), "--lora-modules needs --enable-lora"),
    (("serve", "--enable-lora"), "--enable-lora: only --backend vllm serves LoRA adapters; --backend native does not"),
    (("serve", "--allowed-media-domains", "a"), "only --backend vllm reads media; --backend native does not use it"),
    (("serve", "--backend", "vllm", "--kv-offload-bytes", "1G"), "--backend vllm does not use it: vLLM's KV"),
    (("kv-keeper", "/dev/null/kv"), "/dev/null is no directory and cannot be made one (File exists)"),
    (("serve", "--backend", "vllm", "--kv-keeper", "/run/kv"), "--kv-keeper is a setting of --backend native and sim"),
    ((*SIM, "--weights-cache-bytes", "1G"), "--weights-cache-bytes is a setting of --backend native; --backend sim"),
    (("serve", "--weights-cache-dir", "/w", "--kernels", "reference"), "are arranged for compiled kernels of the CPU"),
    ((*SIM, "--enforce-eager"), "--enforce-eager is a setting of --backend native and vllm; --backend sim does not"),
    ((*SIM, "--dtype", "float32"), "--dtype is a setting of --backend native and vllm"),
    (("serve", "--sim-step-ms", "7"), "--sim-step-ms is a setting of --backend sim; --backend native does not use it"),
    ((*SIM, "--record", "{folder}"), "--record {folder}: others can read the directory; chmod 700 {folder}"),
    ((*SIM, "--record", "{yaml}"), "--record {yaml}: File exists"),
    ((*SIM, "--record-placement", "{folder}"), "--record-placement {folder}: Is a directory"),
    (kv_events(endpoint="tcp://*:5557"), f"--kv-events-config: tcp://*:5557 {LEAVES}"),
    (kv_events(endpoint="tcp://router:5557"), f"tcp://router:5557 {LEAVES}"),
    (kv_events(replay_endpoint="tcp://192.168.1.7:5557"), f"tcp://192.168.1.7:5557 {LEAVES}"),
    (kv_events(endpoint="udp://1.2.3.4:5"), "--kv-events-config: 'udp://1.2.3.4:5' is not an endpoint"),
    (kv_events(endpoint="tcp://127.0.0.1:99999"), "'tcp://127.0.0.1:99999' is not an endpoint"),
    (kv_events(replay_endpoint="tcp://127.0.0.1:5557"), '"replay_endpoint" must differ from "endpoint"'),
    (kv_events(endpoint=f"ipc:///{'x' * 200}"), "an ipc path has at most"),
    (kv_events(publisher="kafka"), "--kv-events-config: input should be 'zmq' or 'null'"),
    (kv_events(buffer_steps=0), "--kv-events-config: input should be greater than or equal to 1"),
    (kv_events(buffer=1), "--kv-events-config: buffer: extra inputs are not permitted"),
]  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return paths that stand in the command lines, in braces."""
    tmp_path = tmp_path_factory.mktemp("places")
    folder, other, yaml = tmp_path / "folder", tmp_path / "other", tmp_path / "config.yaml"
    folder.mkdir()
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"architectures": ["BertModel"]}))
    yaml.write_text("max-num-seq: 4\n")
    (tmp_path / "switch.yaml").write_text("max-num-seqs: yes\n")
    (tmp_path / "broken.jinja").write_text("{{ messages }}\n{% for x in messages %}")
    return {
        "broken": str(tmp_path / "broken.jinja"),
        "folder": str(folder),
        "switch": str(tmp_path / "switch.yaml"),
        "other": str(other),
        "yaml": str(yaml),
        **incomplete_models(tmp_path),
    }


def incomplete_models(tmp_path: Path) -> dict[str, str]:
    """Copies of the demo model, each without something."""
    empty, pointer = "\2" + 7 * "\0" + "{}", "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 135\n"
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    added = {
        "weightless": {"tokenizer.json": "{}", "pytorch_model.bin": ""},
        "incomplete": {"model-1.safetensors": "", INDEX: index},
        "pointer": {"model.safetensors": pointer},
        "pointers": {"model-1.safetensors": empty, "model-2.safetensors": pointer, INDEX: index},
        "pointed-config": {"config.json": pointer},
        "pointed-index": {INDEX: pointer},
        "unread": {},
        "cut": {"model-1.safetensors": empty, "model-2.safetensors": empty[:-1], INDEX: index},
        "wordless": {"model.safetensors": empty},
        "page": {"model.safetensors": empty, "tokenizer.json": "<html></html>"},
        "words": {"model.safetensors": empty, "tokenizer.json": pointer},
        "half": {"model.safetensors": empty, "tokenizer.json": '{"model": '},
    }
    for name, files in added.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text((DEMO_MODEL / "config.json").read_text())
        for file, text in files.items():
            (tmp_path / name / file).write_text(text)
    (tmp_path / "unread" / "model.safetensors").mkdir()  # an error that root gets, too
    (tmp_path / "pointer.gguf").write_text(pointer)
    return {name: str(tmp_path / name) for name in (*added, "pointer.gguf")}


@pytest.mark.parametrize(("arguments", "reason"), MISTAKES, ids=lambda value: " ".join(value) if value else "")
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
        done = run_command(capsys, *(places.get(argument.strip("{}"), argument) for argument in arguments))
    assert (done.status, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("runahead: ")
    assert reason.format(**places) in done.stderr
    assert "Traceback" not in done.stderr
    assert started == []


@pytest.mark.parametrize("command", [("serve", DEMO, "--tensor-parallel-size", "3"), ("convert", "cut.gguf")])
def test_mistake_in_a_process_of_its_own_imports_no_package_of_workers(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "cut.gguf").write_bytes(b"GGUF")
    code = (
        "import sys; from services.cli.app import run\n"
        f"status = run({[*command]})\n"
        "print(status, {'torch', 'numba', 'safetensors'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "set()"]


@pytest.mark.parametrize(
    ("device", "found", "needed"),
    [("cpu", 1, True), ("auto", 0, True), ("auto", 1, False), ("cuda", 0, False), ("cuda", 1, False)],
)
def test_the_native_backend_needs_numba_on_processors_alone(
    device: str, found: int, needed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A CUDA build of torch and what nvidia-smi lists are pretended."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "numba" else find(name))
    monkeypatch.setattr(serving_memory, "installed", lambda _: "2.13.0+cu130")
    monkeypatch.setattr(gpus, "gpus", lambda: [gpus.Gpu("NVIDIA H100", 80 << 30, 79 << 30)] * found)
    with pytest.raises(ConfigurationError, match="needs numba") if needed else nullcontext():
        check_sizes(ServeConfig(model=DEMO, device=device))
