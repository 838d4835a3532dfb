"""The server of llama.cpp as a process. `build_llama_cpp` builds it."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.cli.preflight import free_port
from tests.benchmarks.support.servers import ServerProcess, started, wait_for

DIRECTORY = Path("build/llama.cpp")
SERVER = DIRECTORY / "bin" / "llama-server"
BUILD = "tests/benchmarks/support/build_llama_cpp"


def absent() -> str:
    """Return why there is no server; empty: there is one."""
    if SERVER.is_file():
        return ""
    reason = DIRECTORY / "absent.txt"
    return reason.read_text().strip() if reason.is_file() else f"{SERVER} is missing; build it with: {BUILD}"


def features() -> str:
    """Return the processor features that the server was built for."""
    lines = (DIRECTORY / "bin" / "features.txt").read_text().split()
    return ", ".join(line.removeprefix("GGML_").removesuffix("=ON") for line in lines if line.endswith("=ON"))


@contextmanager
def llama_cpp(model: Path, streams: int, context: int, threads: int) -> Iterator[ServerProcess]:
    """Start a server with one slot of `context` tokens for each stream. It keeps no prompts."""
    port = free_port("127.0.0.1", 0)
    command = [
        str(SERVER), f"--model={model}", "--host=127.0.0.1", f"--port={port}", f"--threads={threads}",
        f"--threads-batch={threads}", f"--parallel={streams}", f"--ctx-size={streams * context}", "--cont-batching",
        "--no-cache-prompt", "--cache-ram=0", "--alias=model", "--offline", "--log-disable",
    ]  # fmt: skip
    separate = [part for item in command for part in (item.split("=", 1) if item.startswith("--") else [item])]
    with started(separate, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        url = f"http://127.0.0.1:{port}"
        wait_for(f"{url}/health", process)
        yield ServerProcess(url, process.pid)
