"""The checkpoint of a worker's model."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from protocol.membership import Speculation
from services.checkpoint import WEIGHT_FILES, CheckpointError, is_gguf, read_text, resolve, text_digest
from services.config import WorkerConfig
from services.worker.runner import LoadError
from services.worker.weights.checkpoint import Checkpoint
from services.worker.weights.gguf_checkpoint import GgufCheckpoint
from services.worker.weights.safetensors_checkpoint import SafetensorsCheckpoint


def checkpoint_path(config: WorkerConfig) -> Path:
    """Return the directory or the GGUF file of the worker's model. Raises: CheckpointError"""
    return resolve(config.model, config.revision, WEIGHT_FILES)


def drafter_path(speculation: Speculation) -> Path:
    """Return the directory of the drafter's checkpoint. Raises: LoadError"""
    try:
        return resolve(speculation.model, speculation.revision or None, WEIGHT_FILES)
    except CheckpointError as error:
        raise LoadError(f"the drafter: {error}") from error


def open_checkpoint(path: Path) -> Checkpoint:
    """Raises: LoadError or CheckpointError, when the files are missing, broken or not supported."""
    return GgufCheckpoint(path) if is_gguf(path) else SafetensorsCheckpoint(path)


def model_digest(path: Path, checkpoint: Checkpoint, settings: Sequence[str] = ()) -> str:
    """Return the hash that workers register with.

    Args:
        settings: what else changes the values that are computed.

    Raises: CheckpointError
    """
    digest = checkpoint.digest((read_text(path, "config.json") or "").encode())
    return hashlib.sha256(" ".join([digest, *settings]).encode()).hexdigest() if settings else digest


def tokenizer_digest(path: Path) -> str:
    """Return the digest of tokenizer.json beside the weights, "" without one. Raises: CheckpointError"""
    text = read_text(path, "tokenizer.json")
    return "" if text is None else text_digest(text)
