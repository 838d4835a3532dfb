"""The checkpoint of a worker's model."""

from pathlib import Path

from services.checkpoint import WEIGHT_FILES, CheckpointError, is_gguf, read_text, resolve
from services.config import WorkerConfig
from services.worker.runner import LoadError
from services.worker.weights.checkpoint import Checkpoint
from services.worker.weights.gguf_checkpoint import GgufCheckpoint
from services.worker.weights.safetensors_checkpoint import SafetensorsCheckpoint


def checkpoint_path(config: WorkerConfig) -> Path:
    """Return the directory or the GGUF file of the worker's model. Raises: LoadError"""
    try:
        return resolve(config.model, config.revision, WEIGHT_FILES)
    except CheckpointError as error:
        raise LoadError(str(error)) from error


def open_checkpoint(path: Path) -> Checkpoint:
    """Raises: LoadError, when the files are missing, broken or not supported."""
    return GgufCheckpoint(path) if is_gguf(path) else SafetensorsCheckpoint(path)


def model_digest(path: Path, checkpoint: Checkpoint) -> str:
    """Return the hash that workers register with. Raises: LoadError"""
    try:
        text = read_text(path, "config.json")
    except CheckpointError as error:
        raise LoadError(str(error)) from error
    return checkpoint.digest((text or "").encode())
