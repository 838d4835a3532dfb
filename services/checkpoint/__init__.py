"""Checkpoints: directories in Hugging Face format and GGUF files; their location, and their files.

Frontends read the tokenizer, workers the weights. This package contains what both need, without torch.
"""

from services.checkpoint.dtype import default_dtype
from services.checkpoint.errors import CheckpointError
from services.checkpoint.files import named_eos, read_json, read_text, special_tokens, text_digest
from services.checkpoint.location import (
    CONFIG_FILES,
    DEMO_MODEL,
    GGUF,
    WEIGHT_FILES,
    is_gguf,
    is_local,
    model_name,
    resolve,
)
from services.checkpoint.shards import weight_shards
