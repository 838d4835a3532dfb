"""The checkpoint of the simulated model: its JSON files; weights are never opened."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from services.checkpoint import read_json, resolve
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
        if config.sim_vocab_size and not config.model:
            return cls._from_json({}, {}, config.sim_vocab_size)
        path = resolve(config.model, config.revision)
        model, generation = (read_json(path, f"{name}.json") for name in ("config", "generation_config"))
        if not model:
            raise LoadError(f"{path} has no config.json; give a directory in Hugging Face format")
        return cls._from_json(model, generation, config.sim_vocab_size)

    @classmethod
    def _from_json(cls, model: dict[str, Any], generation: dict[str, Any], vocab_size: int) -> "SimCheckpoint":
        eos = generation.get("eos_token_id", model.get("eos_token_id"))
        ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        return cls(
            vocab_size or int(model.get("vocab_size", DEFAULT_VOCAB_SIZE)),
            int(model.get("max_position_embeddings", DEFAULT_MAX_MODEL_LEN)),
            tuple(int(token) for token in ids),
            hashlib.sha256(json.dumps([model, vocab_size], sort_keys=True).encode()).hexdigest(),
        )
