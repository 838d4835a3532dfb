"""`runahead run-batch`: answers an OpenAI batch file, with services of its own or those of a running server."""

import asyncio
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from services.cli.ask import NoAnswer, ServerAddress, base_url, first_model
from services.cli.preflight import with_keys
from services.cli.run_batch.batch import Batch
from services.cli.serve import serve
from services.cli.settings import ConfigurationError, file_to_write, refusing
from services.config import ClientConfig, RunBatchConfig, ServeConfig, flag
from services.private import private_directory, short_base

DIRECTORY_PREFIX = "runahead-batch-"


def run_batch(config: RunBatchConfig) -> int:
    """Answer the batch and print its counts. Return the exit status: 1 if a line has no answer or an error.

    Raises: ConfigurationError: a file or the server cannot be used.
    """
    source, output = _files(config)
    batch = Batch(source, output, config.max_concurrency or config.max_num_seqs)
    started = time.monotonic()
    if config.url:
        server = ServerAddress(base_url(config.url), with_keys(config))
        with refusing(NoAnswer, prefix="--url: "):
            first_model(server)
        asyncio.run(batch.run(server))
        status = 0
    else:
        status = _run_with_services(config, batch)
    errors = f", {batch.num_errors} with errors" if batch.num_errors else ""
    left = "" if batch.ended else "; stopped before the end of the input"
    print(f"{batch.num_written} lines written to {output}{errors}, in {time.monotonic() - started:.1f} s{left}")
    if batch.error:
        raise ConfigurationError(batch.error)
    return status or int(batch.num_errors > 0 or not batch.ended)


def _files(config: RunBatchConfig) -> tuple[Path, Path]:
    """Return input and output. Raises: ConfigurationError, if one is missing or is not a local file that can be used"""
    for name in ("input_file", "output_file"):
        value = getattr(config, name)
        if not value:
            raise ConfigurationError(f"run-batch needs {flag(name)} FILE")
        if "://" in value:
            raise ConfigurationError(f"{flag(name)}: {value} is no local file; download or copy it yourself")
    source = Path(os.path.expanduser(config.input_file))
    if not source.is_file():
        raise ConfigurationError(f"--input-file: there is no file {source}")
    target = file_to_write("output_file", os.path.expanduser(config.output_file))
    if target.exists() and target.samefile(source):
        raise ConfigurationError(f"--output-file: {target} is the input file")
    return source, target


def _run_with_services(config: RunBatchConfig, batch: Batch) -> int:
    """Start the services on a Unix socket in a private directory, run the batch, and stop them."""
    of_clients = {*ClientConfig.model_fields, "api_key_file"}  # only this user reaches the socket
    names = config.model_fields_set & ServeConfig.model_fields.keys() - of_clients
    fields = {name: getattr(config, name) for name in names}
    with private_directory(short_base(DIRECTORY_PREFIX, "http"), DIRECTORY_PREFIX) as directory:
        socket = str(directory / "http")
        own = ServeConfig.model_validate(fields | {"uds": socket})
        thread: threading.Thread | None = None

        def on_ready(stop: Callable[[], None]) -> None:
            nonlocal thread

            def work() -> None:
                try:
                    asyncio.run(batch.run(ServerAddress("http://localhost"), socket))
                finally:
                    stop()

            thread = threading.Thread(target=work)
            thread.start()

        status = serve(own, on_ready)
        batch.server_ended.set()
        if thread is not None:
            thread.join()
    return status
