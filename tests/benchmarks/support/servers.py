"""Runahead and vLLM as server processes, and the metrics of one load on a server."""

import contextlib
import importlib
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from services.cli.bench.load import run_load
from services.cli.bench.metrics import summarize
from services.cli.preflight import free_port
from services.config import BenchConfig
from tests.metrics import total

VLLM_ENVIRONMENT = Path(".venv-vllm")
"""Environment with vLLM, made by `make setup-vllm`."""
PATIENCE = 900.0
"""Seconds to wait for the start or end of a server. vLLM compiles the model first."""


class ServerProcess(NamedTuple):
    url: str
    session: int
    """Session of the server's processes."""

    def resident_bytes(self) -> int:
        """Return the resident memory of all processes; a page that several of them share counts once."""
        return sum(map(_proportional_bytes, self.processes()))

    def processes(self) -> Iterator[Path]:
        """Yield the directory in /proc of each of the server's processes."""
        return (path for path in Path("/proc").glob("[0-9]*") if self._owns(path))

    def _owns(self, path: Path) -> bool:
        try:
            return int((path / "stat").read_text().rsplit(")", 1)[1].split()[3]) == self.session
        except OSError:  # it has ended
            return False


def _proportional_bytes(path: Path) -> int:
    try:
        lines = (path / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def end_on_sigterm() -> None:
    """Make SIGTERM end the benchmark as SIGINT does, so that the servers are stopped.

    An exception that the handler raises may be caught by the callback of a load that it interrupts. On SIGINT asyncio
    cancels the load instead.
    """
    # Ignored by a process in the background of a script
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))


def vllm_python() -> str:
    """Return the Python interpreter with vLLM. Raises: SystemExit, if there is none."""
    python = VLLM_ENVIRONMENT / "bin" / "python"
    if not python.exists():
        raise SystemExit("vLLM is not installed; install it with: make setup-vllm")
    return str(python)


BACKENDS: Mapping[str, Callable[[], str]] = {"native": lambda: sys.executable, "vllm": vllm_python}
"""Backend -> its Python interpreter."""


@contextmanager
def runahead_process(
    model: Path | str, *arguments: str, python: str = sys.executable, run: Sequence[str] = ("-m", "services.cli")
) -> Iterator[ServerProcess]:
    """Start `runahead serve` with these arguments.

    Args:
        model: "": the default model.
        run: arguments of Python that run it.
    """
    command = [python, *run, "serve", str(model), "--port=0", "--log-level=warning", *arguments]
    with started(command, stdout=subprocess.PIPE) as process:
        line = process.stdout.readline() if process.stdout else ""
        match = re.search(r"(http://\S+)/v1", line)
        if match is None:
            raise SystemExit(f"the server did not start: {line}")
        yield ServerProcess(match[1], process.pid)


@contextmanager
def side_by_side(
    model: Path, backend: str, dtype: str, settings: Mapping[int, Sequence[str]]
) -> Iterator[dict[int, ServerProcess]]:
    """Run a server with each of the settings at the same time, so that all meet the same machine; a server without
    requests does not compute."""
    common = (f"--backend={backend}", f"--dtype={dtype}", "--kv-cache-memory-bytes=1G")
    common += ("--block-size=32",)  # vLLM's attention on the CPU requires a multiple of it
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(runahead_process(model, *common, *flags, python=BACKENDS[backend]()))
            for name, flags in settings.items()
        }


@contextmanager
def vllm_process(
    model: Path,
    *arguments: str,
    threads: int | None = None,
    run: Sequence[str] = ("-m", "vllm.entrypoints.cli.main"),
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[ServerProcess]:
    """Start `vllm serve` with these arguments.

    Args:
        threads: number of compute threads; None: vLLM's default.
        run: arguments of Python that run the server.
        variables: further environment variables.
    """
    port = free_port("127.0.0.1", 0)
    command = [
        vllm_python(), *run, "serve", str(model), f"--port={port}", "--host=127.0.0.1",
        "--served-model-name=model", *arguments,
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="runahead-vllm-") as directory:
        _name_as_vllm(Path(directory))
        environment = {
            **os.environ,
            "PYTHONPATH": directory,
            "TMPDIR": directory,  # vLLM leaves files there
            "TORCHINDUCTOR_CACHE_DIR": str((VLLM_ENVIRONMENT / "compiled").resolve()),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            **({"VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}"} if threads else {}),
            **variables,
        }
        with started(command, env=environment, stdout=subprocess.DEVNULL) as process:
            url = f"http://127.0.0.1:{port}"
            wait_for(f"{url}/health", process)
            yield ServerProcess(url, process.pid)


def _name_as_vllm(directory: Path) -> None:
    """Copy the metadata of `vllm-cpu` under the name `vllm`, with a CPU version.

    vLLM's command reads the metadata of `vllm` and supports the CPU only with such a version. Only the process of the
    command finds the copy.
    """
    (installed,) = VLLM_ENVIRONMENT.glob("lib/python*/site-packages/vllm_cpu-*.dist-info")
    version = installed.name.removeprefix("vllm_cpu-").removesuffix(".dist-info")
    copied = shutil.copytree(installed, directory / f"vllm-{version}.dist-info")
    metadata = (copied / "METADATA").read_text()
    metadata = re.sub(r"^Name: .*$", "Name: vllm", metadata, count=1, flags=re.MULTILINE)
    metadata = re.sub(r"^Version: .*$", f"Version: {version}+cpu", metadata, count=1, flags=re.MULTILINE)
    (copied / "METADATA").write_text(metadata)


@contextmanager
def started(command: list[str], **options: Any) -> Iterator["subprocess.Popen[str]"]:
    """Start a process. At the end, also by SIGTERM, kill its whole session, so that the next server has the machine to
    itself."""
    end_on_sigterm()
    with subprocess.Popen(command, text=True, start_new_session=True, **options) as process:
        try:
            yield process
        finally:
            try:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(PATIENCE)
            finally:  # also when a signal ends the wait
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


class BatchLoad(NamedTuple):
    """Waves of requests with equal lengths, for a static batch."""

    model: Path
    dtype: str
    threads: int
    batch: int
    prompt: int
    """Tokens."""
    output: int
    waves: int


def without_engine(module: str, load: BatchLoad, *args: object) -> dict[str, float]:
    """Call `measure` of a module of this folder in a process of its own, and return its metrics."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_measure, module, load, *args).result()


def _measure(module: str, *args: object) -> dict[str, float]:
    measure: Callable[..., dict[str, float]] = importlib.import_module(f"tests.benchmarks.support.{module}").measure
    return measure(*args)


def metrics(url: str) -> str:
    """Return the page with the metrics of a server."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        return str(answer.read().decode())


def forward_seconds(url: str) -> tuple[float, float]:
    """Return for how long a server of ours has computed forward passes, and how long the gaps between them were."""
    page = metrics(url)
    forward, gap = (total(page, f"runahead:worker_{name}_seconds_total") for name in ("forward", "forward_gap"))
    return forward, gap


def wait_for(url: str, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise SystemExit(f"no answer from {url}")


def served(
    url: str, concurrency: int, input_len: int, output_len: int, waves: int, warmups: int = 2, seed: int = 0
) -> dict[str, Any]:
    """Return the metrics of a closed loop of streams with `concurrency` open requests, `waves` times as many in all.
    Before it, `warmups` requests are sent one after the other.

    Args:
        seed: of the prompts; those of the warm-up have the next one.

    Raises: SystemExit, if a request failed.
    """
    config = BenchConfig(
        base_url=url,
        num_prompts=concurrency * waves,
        num_warmups=warmups,
        max_concurrency=concurrency,
        random_input_len=input_len,
        random_output_len=output_len,
        ignore_eos=True,
        seed=seed,
    )
    load = run_load(config)
    result = summarize(config, load)
    if result["failed"]:
        first = next(request.error for request in load.requests if request.error)
        raise SystemExit(f"{result['failed']} requests failed: {first}")
    return result
