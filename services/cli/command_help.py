"""Commands whose help lists the options in groups: common ones first, the simulator's last."""

from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel
from typer.core import TyperCommand

from services.cli.flags_of_others import hint
from services.cli.settings import ConfigurationError
from services.config import (
    OF_RAY,
    WHY_NOT_OF_RAY,
    FrontendConfig,
    HttpConfig,
    SchedulerConfig,
    ServiceConfig,
    SimulatorConfig,
)
from services.config import flag as flag_of
from services.config.worker import BackendConfig

COMMON = (
    "model", "input_file", "output_file", "url", "base_url", "host", "port", "api_key", "served_model_name", "backend",
    "device", "dtype", "quantization", "max_model_len", "max_num_seqs", "kv_cache_memory_bytes", "tensor_parallel_size",
    "speculative_config", "enable_auto_tool_choice", "tool_call_parser", "reasoning_parser",
)  # fmt: skip
"""Settings that most users need first, in the order of the help."""
GROUPS: dict[str, type[BaseModel]] = {
    "API": FrontendConfig,
    "HTTP server": HttpConfig,
    "Scheduler": SchedulerConfig,
    "Worker": BackendConfig,
    "Logs, recovery and connections": ServiceConfig,
    "Simulator": SimulatorConfig,
}
"""Title and the configuration that declares the settings."""
ORDER = ("Common options", "Options", *GROUPS)


def group_of(name: str, model: type[BaseModel]) -> str:
    """Return the title of the group of a field of `model`."""
    if name in COMMON:
        return ORDER[0]
    owners = (title for title, owner in GROUPS.items() if issubclass(model, owner) and name in owner.__annotations__)
    return next(owners, "Options")


def position(name: str) -> int:
    """Return the place of a field within its group; fields without one keep their order."""
    return COMMON.index(name) if name in COMMON else len(COMMON)


class GroupedCommand(TyperCommand):
    """A command with groups of options; an option of `SEVERAL` may have several values."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {flag for option in self.params for flag in (*option.opts, *option.secondary_opts)}
        for index, argument in enumerate(args):
            flag, separator, value = argument.partition("=")
            dashed = flag.replace("_", "-")  # vLLM takes both
            if flag in known or not flag.startswith("-"):
                continue
            if dashed in known:
                args[index] = f"{dashed}{separator}{value}"
            elif (text := hint(dashed)) is not None:
                raise ConfigurationError(text)
            elif ctx.info_name == "ray" and dashed in map(flag_of, OF_RAY):
                raise ConfigurationError(f"{dashed}: {WHY_NOT_OF_RAY}")
        return super().parse_args(ctx, [*_repeated(args)])

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Arguments", *ORDER)}
        parameters: list[Any] = self.get_params(ctx)
        for parameter in parameters:
            record = parameter.get_help_record(ctx)
            if record is not None:
                is_argument = parameter.param_type_name == "argument"
                groups["Arguments" if is_argument else parameter.rich_help_panel or "Options"].append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


SEVERAL = ("--served-model-name", "--allowed-media-domains", "--lora-modules")
"""Take several values after one flag, as in vLLM."""


def _repeated(args: Iterable[str]) -> Iterator[str]:
    """Repeat the flag before each further value."""
    values, flag = 0, ""
    for argument in args:
        if argument.startswith("-"):
            flag, separator, _ = argument.partition("=")
            values = len(separator)
        else:
            if values and flag in SEVERAL:
                yield flag
            values += 1
        yield argument
