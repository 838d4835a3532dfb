"""The checkpoint of the simulated model: its JSON files; weights are never opened."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from services.checkpoint import named_eos, read_json, resolve
from services.config import WorkerConfig
from services.worker.runner import LoadError

DEFAULT_VOCAB_SIZE = 32_000
DEFAULT_MAX_MODEL_LEN = 4096


@dataclass(frozen=True)
class SimCheckpoint:
    """The properties of a checkpoint that the simulator uses."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    digest: str
    """Hex digest of config.json and the vocabulary size."""

    @classmethod
    def from_config(cls, config: WorkerConfig) -> "SimCheckpoint":
        """Read the checkpoint of `config.model`, or make one without files if only `sim_vocab_size` is set.

        Raises: LoadError or CheckpointError, if the files cannot be read.
        """
        model: dict[str, Any] = {}
        eos: list[Any] = []
        if config.model or not config.sim_vocab_size:
            path = resolve(config.model, config.revision)
            if not (model := read_json(path, "config.json")):
                raise LoadError(f"{path} has no config.json; give a directory in Hugging Face format")
            eos = named_eos(path)
        return cls(
            config.sim_vocab_size or int(model.get("vocab_size", DEFAULT_VOCAB_SIZE)),
            int(model.get("max_position_embeddings", DEFAULT_MAX_MODEL_LEN)),
            tuple(map(int, eos)),
            hashlib.sha256(json.dumps([model, config.sim_vocab_size], sort_keys=True).encode()).hexdigest(),
        )
