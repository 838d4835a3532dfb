"""Weights of a model: `Checkpoint` is the interface, over safetensors files and over GGUF files."""

from services.worker.weights.checkpoint import Checkpoint, Cut
from services.worker.weights.contents import Contents, HashedCheckpoint, layer_contents
from services.worker.weights.opening import (
    checkpoint_path,
    drafter_path,
    model_digest,
    open_checkpoint,
    tokenizer_digest,
)
