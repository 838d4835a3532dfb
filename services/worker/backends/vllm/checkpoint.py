"""What a checkpoint says of itself before vLLM has read it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.checkpoint import CheckpointError, default_dtype, read_json
from services.config import WorkerConfig
from services.worker.runner import LoadError
from services.worker.weights import Checkpoint

DTYPES = ("float32", "bfloat16", "float16")
"""Data types of activations that vLLM computes in."""
CHOICES = DTYPES[:2]
"""Those that --dtype takes."""


@dataclass(frozen=True)
class Facts:
    digest: str
    """As the native backend makes it: of config.json and every tensor's name, shape and type."""
    dtype: str
    tensor_parallel_sizes: tuple[int, ...]

    @classmethod
    def of(cls, directory: Path, worker: WorkerConfig) -> "Facts":
        """Raises: LoadError"""
        path = directory / "config.json"
        try:
            config, content = read_json(path), path.read_bytes()
        except (CheckpointError, OSError) as error:
            raise LoadError(f"{path} cannot be read: {error}; download the model again") from error
        model = config.get("text_config", config)
        return cls(Checkpoint(directory).digest(content), _dtype(worker, model), _sizes(model))


def _dtype(worker: WorkerConfig, model: dict[str, Any]) -> str:
    """The user's, the demo model's, or the checkpoint's own."""
    if worker.dtype != "auto":
        return worker.dtype
    own = str(model.get("dtype") or model.get("torch_dtype") or "float32").removeprefix("torch.")
    dtype = default_dtype(worker.model) or own
    if dtype not in DTYPES:
        raise LoadError(
            f"config.json names the dtype {dtype}; choose one of {' or '.join(CHOICES)} with --dtype"
        )
    return dtype


def _sizes(model: dict[str, Any]) -> tuple[int, ...]:
    """Ranks that the heads of attention can be shared among, in ascending order; vLLM pads the vocabulary and looks at
    the rest when it loads."""
    heads = model.get("num_attention_heads") or model.get("n_head")
    if not isinstance(heads, int) or heads < 1:
        return (1,)
    kv_heads = model.get("num_key_value_heads") or heads
    return tuple(
        size
        for size in range(1, heads + 1)
        if heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
    )
