"""Files of a Hugging Face checkpoint, made from a GGUF file."""

import json
from collections.abc import Callable
from typing import Any

from services.checkpoint.gguf.config import generation_config, hf_config
from services.checkpoint.gguf.header import GgufHeader
from services.checkpoint.gguf.tokenizer import tokenizer_config, tokenizer_json

FILES: dict[str, Callable[[GgufHeader], dict[str, Any]]] = {
    "config.json": hf_config,
    "generation_config.json": generation_config,
    "tokenizer.json": tokenizer_json,
    "tokenizer_config.json": tokenizer_config,
}
"""Names of the files, and the functions that make their content. They raise CheckpointError."""


def read_gguf_text(header: GgufHeader, name: str) -> str | None:
    """Return the text of a file, None if the GGUF file has no data for it. Raises: CheckpointError"""
    return json.dumps(FILES[name](header), ensure_ascii=False) if name in FILES else None
