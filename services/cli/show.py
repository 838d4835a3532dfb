"""`runahead config show`: the merged configuration, as YAML that `--config` accepts."""

import json
import sys
from collections.abc import Iterator

from services.checkpoint import CheckpointError, is_local, model_name, resolve
from services.cli.serving_memory import serving_memory
from services.cli.settings import Settings
from services.config import BaseConfig, ServeConfig
from services.worker import machine
from services.worker.backends.native.memory import served_dtype
from services.worker.backends.native.model.config import ModelConfig
from services.worker.runner import LoadError


def show(settings: Settings[ServeConfig]) -> int:
    """Print `name: value  # origin` for each setting, then the values that follow from the model and the machine, as
    comments. Only the number of API keys is printed."""
    for name, origin in settings.origins.items():
        key, value = name.replace("_", "-"), getattr(settings.config, name)
        if name == "api_key" and value:
            sys.stdout.write(f"# {key}: {len(value)} not shown  # {origin}\n")
            continue
        sys.stdout.write(f"{key}: {json.dumps(value, default=_plain)}  # {origin}\n")
    given = {name for name, origin in settings.origins.items() if origin != "default"}
    for name, value in (*_of_engine(settings.config), *_of_model(settings.config)):
        if name not in given or getattr(settings.config, name) in (0, "auto", ""):
            sys.stdout.write(f"# {name.replace('_', '-')}: {json.dumps(value)}  # resolved\n")
    return 0


def _plain(value: object) -> object:
    """Return a nested configuration as an object of JSON."""
    return value.model_dump(exclude_unset=True) if isinstance(value, BaseConfig) else str(value)


def _of_engine(config: ServeConfig) -> Iterator[tuple[str, object]]:
    yield "batching_policy", config.policy
    yield "batch_queue_depth", config.depth
    if config.backend != "sim":
        yield "threads", max(1, machine.cores() // config.num_workers)
    on_host = config.device != "cuda" if config.backend == "vllm" else not serving_memory(config).is_gpu
    if config.backend != "sim" and on_host:
        yield "kv_cache_memory_bytes", machine.cache_budget(config.kv_cache_memory_bytes)


def _of_model(config: ServeConfig) -> Iterator[tuple[str, object]]:
    """Yield what the files of a model on this machine say; nothing for another one."""
    if not is_local(config.model):
        return
    try:
        path = resolve(config.model)
        yield "model", str(path)
        yield "served_model_name", [model_name(path)]
        if config.backend == "native":
            model = ModelConfig.from_checkpoint(path)
            yield "max_model_len", model.max_position
            yield "dtype", served_dtype(config, model)
    except (CheckpointError, LoadError):  # `serve` says why
        return
