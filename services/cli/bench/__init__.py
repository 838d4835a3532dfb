"""`runahead bench`: sends load to an OpenAI-compatible API. Metrics and their names are those of `vllm bench serve`."""

import json
import sys
import time
from pathlib import Path

from services.cli.bench.metrics import summarize
from services.cli.settings import ConfigurationError
from services.config import BenchConfig

__all__ = ["bench"]


def bench(config: BenchConfig) -> int:
    """Send the load, print a table and write the JSON file if configured. Return 1 if a request failed, else 0.

    Raises:
        ConfigurationError: the server cannot be reached, or aiohttp is not installed.
    """
    try:
        from services.cli.bench.load import ServerError, run_load
    except ModuleNotFoundError as error:
        raise ConfigurationError(
            f"bench needs {error.name}; install it from a checkout: pip install -e '.[bench]'"
        ) from None
    try:
        load = run_load(config)
    except ServerError as error:
        raise ConfigurationError(str(error)) from None
    result = summarize(config, load)
    _print(result)
    for reason in sorted({r.error for r in load.requests if r.error})[:5]:
        print(f"failed: {reason}", file=sys.stderr)
    if config.save_result or config.result_filename:
        file = Path(config.result_filename or f"bench-{time.strftime('%Y%m%d-%H%M%S')}.json")
        file.write_text(json.dumps(result, indent=1) + "\n")
        print(f"results written to {file}")
    return 1 if result["failed"] else 0


def _print(result: dict[str, object]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("metric", "value", title=f"{result['model_id']} at {result['base_url']}")
    table.columns[1].justify = "right"
    for name, value in result.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            table.add_row(name, f"{value:,.2f}" if isinstance(value, float) else f"{value:,}")
    Console().print(table)
