"""`runahead bench`: sends load to an OpenAI-compatible API. Metrics and their names are those of `vllm bench serve`."""

import json
import os
import sys
import time
from pathlib import Path

from services.cli.ask import NoAnswer
from services.cli.bench.metrics import summarize
from services.cli.settings import ConfigurationError, refusing
from services.config import BenchConfig


def bench(config: BenchConfig) -> int:
    """Send the load, print the report and write the JSON file if configured. Return 1 if a request failed, else 0.

    Raises: ConfigurationError: the server cannot be reached, the file cannot be written, or aiohttp is not installed.
    """
    try:
        from services.cli.bench.load import run_load
        from services.cli.bench.report import charts, report
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"bench needs {error.name}: pip install {error.name}") from None
    file = _result_file(config)
    with refusing(NoAnswer):
        load = run_load(config)
    result = summarize(config, load)
    print(f"{result['model_id']} at {result['base_url']}")
    if result["completed"]:  # else there is nothing to report but the errors
        print("\n".join([*report(result), *(charts(load) if config.draw else ())]))
    for reason in sorted({r.error for r in load.requests if r.error})[:5]:
        print(f"failed: {reason}", file=sys.stderr)
    if file is not None:
        file.write_text(json.dumps(result, indent=1) + "\n")
        print(f"results written to {file}")
    return 1 if result["failed"] else 0


def _result_file(config: BenchConfig) -> Path | None:
    """Return the file for the results, if there is one. Raises: ConfigurationError, before the load is sent"""
    if not (config.save_result or config.result_filename):
        return None
    name = config.result_filename or f"bench-{time.strftime('%Y%m%d-%H%M%S')}.json"
    file = Path(os.path.expanduser(name))
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ConfigurationError(f"--result-filename: cannot write {file}; give a file in an existing directory")
    return file
