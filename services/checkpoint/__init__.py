"""Checkpoints: directories in Hugging Face format and GGUF files; their location, and their files.

Frontends read the tokenizer, workers the weights. This package contains what both need, without torch.
"""

from services.checkpoint.errors import CheckpointError
from services.checkpoint.files import (
    ADAPTER_WEIGHTS,
    adapter_digest,
    named_eos,
    read_json,
    read_text,
    special_tokens,
    text_digest,
    weight_shards,
)
from services.checkpoint.location import (
    CONFIG_FILES,
    DEMO_MODEL,
    GGUF,
    WEIGHT_FILES,
    default_dtype,
    is_gguf,
    is_local,
    model_name,
    resolve,
)
