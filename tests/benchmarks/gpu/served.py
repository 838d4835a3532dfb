"""The 8B model behind HTTP, against the decode steps of the runner alone. Needs the packages of all services."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from services.worker.backends.native.model.config import ModelConfig
from tests.benchmarks.gpu.engine import StageEngine
from tests.benchmarks.gpu.shapes import SHAPES, RandomCheckpoint
from tests.benchmarks.gpu.target import MeasuredDevice

MODEL, BATCH, PROMPT, OUTPUT = "llama-3.1-8b", 64, 128, 256
START = 240.0
"""Seconds that the server has until it is ready."""


def served(target: MeasuredDevice) -> dict[str, Any]:
    """Tokens per second of 64 concurrent requests through HTTP, and of the bare stages at the same batch."""
    from tests.benchmarks.support.random_llama import write_tokenizer

    directory = Path(os.environ.get("TMPDIR", "/tmp")) / "runahead-gpu" / MODEL
    if not (directory / "config.json").is_file():
        write_checkpoint(directory, SHAPES[MODEL], target.dtype)
        write_tokenizer(directory)
    bare = _bare_stages(target)
    torch.cuda.empty_cache()  # the server needs the memory
    with _server(directory) as url:
        result = _bench(url, directory.parent / "bench.json")
    return {"bare_tokens_per_second": bare, "result": result, "model": MODEL, "batch": BATCH}


def _bare_stages(target: MeasuredDevice) -> float:
    """Return tokens per second. Their memory is not used any more afterwards."""
    kernels = target.make(target.dtype)
    with StageEngine(SHAPES[MODEL], kernels, target.dtype, BATCH, 512, BATCH * PROMPT) as engine:
        engine.prefill(PROMPT)
        engine.decode(30, 2)
        began = time.monotonic()
        engine.decode(200, 2)
        return 200 * BATCH / (time.monotonic() - began)


def write_checkpoint(directory: Path, shape: ModelConfig, dtype: torch.dtype) -> None:
    """Write random weights in Hugging Face format, one file per layer."""
    directory.mkdir(parents=True, exist_ok=True)
    checkpoint = RandomCheckpoint(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    index: dict[str, str] = {}

    def write(file: str, tensors: dict[str, tuple[int, ...]]) -> None:
        values = {name: checkpoint.take(name, size, dtype).cpu() for name, size in tensors.items()}
        save_file(values, directory / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, file))

    hidden, mlp = shape.hidden_size, shape.intermediate_size
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    ends = {"model.embed_tokens.weight": (shape.vocab_size, hidden), "model.norm.weight": (hidden,)}
    write("ends.safetensors", ends | ({} if shape.tied else {"lm_head.weight": (shape.vocab_size, hidden)}))
    products = {"q": (queries, hidden), "k": (keys, hidden), "v": (keys, hidden), "o": (hidden, queries)}
    for number in range(shape.num_layers):
        layer = f"model.layers.{number}."
        tensors: dict[str, tuple[int, ...]] = {
            f"{layer}self_attn.{name}_proj.weight": size for name, size in products.items()
        }
        tensors |= {f"{layer}mlp.{name}_proj.weight": (mlp, hidden) for name in ("gate", "up")}
        tensors[f"{layer}mlp.down_proj.weight"] = (hidden, mlp)
        tensors |= {f"{layer}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        write(f"layer-{number}.safetensors", tensors)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (directory / "config.json").write_text(json.dumps(config_json(shape), indent=1))


def config_json(shape: ModelConfig) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": shape.norm_eps,
        "rope_theta": shape.rope.theta,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": shape.tied,
        "torch_dtype": shape.dtype,
    }


@contextmanager
def _server(directory: Path) -> Iterator[str]:
    """Yield the URL of a server that is ready.

    Raises: RuntimeError, with the end of its output, if it is not ready in time.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "services.cli",
        "serve",
        str(directory),
        "--device",
        "cuda",
        "--port",
        str(port),
    ]
    command += ["--max-num-seqs", str(BATCH), "--max-model-len", "2048"]
    log = directory.parent / "serve.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        deadline = time.monotonic() + START
        while not _ready(f"http://127.0.0.1:{port}/readyz"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server is not ready:\n{log.read_text()[-4000:]}")
            time.sleep(1.0)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except OSError:
        return False


def _bench(url: str, file: Path) -> Any:
    command = [sys.executable, "-m", "services.cli", "bench", "--base-url", url, "--ignore-eos"]
    command += ["--num-prompts", str(4 * BATCH), "--max-concurrency", str(BATCH), "--num-warmups", str(BATCH)]
    command += ["--random-input-len", str(PROMPT), "--random-output-len", str(OUTPUT)]
    subprocess.run([*command, "--result-filename", str(file)], check=True)
    return json.loads(file.read_text())
