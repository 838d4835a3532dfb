"""Files of a checkpoint, and the names of those with its weights. For a GGUF file they are made from its metadata."""

import hashlib
import json
from pathlib import Path
from typing import Any

from services.checkpoint.default_model import overlaid_text
from services.checkpoint.errors import CheckpointError
from services.checkpoint.gguf import read_gguf_text, read_header
from services.checkpoint.location import check_pointer, is_gguf

ADAPTER_WEIGHTS = "adapter_model.safetensors"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_text(checkpoint: Path, name: str) -> str | None:
    """Return the text of a file, None if the checkpoint has no such file.

    Args:
        checkpoint: a directory or a GGUF file, as `resolve` returns it.
        name: path of the file in the directory.

    Raises: CheckpointError
    """
    if is_gguf(checkpoint):
        overlaid = overlaid_text(checkpoint, name)
        return overlaid if overlaid is not None else read_gguf_text(read_header(checkpoint), name)
    path = checkpoint / name
    if not path.is_file():
        return None
    check_pointer(path)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def text_digest(text: str) -> str:
    """Return a digest of a file's text: the same one in every service that reads the same file."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def read_json(checkpoint: Path, name: str) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one if the file does not exist. Raises: CheckpointError"""
    text = read_text(checkpoint, name)
    if text is None:
        return {}
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{checkpoint / name} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{checkpoint / name} does not contain a JSON object")
    return content


def special_tokens(checkpoint: Path) -> dict[str, str]:
    """Return the texts of the special tokens by their names in chat templates. Raises: CheckpointError"""
    names = "special_tokens_map.json", "tokenizer_config.json"
    first, second = (read_json(checkpoint, name) for name in names)
    config = first | second
    tokens = {name: config.get(name) for name in _SPECIAL}
    texts = {name: t.get("content") if isinstance(t, dict) else t for name, t in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str) and text}


def named_eos(checkpoint: Path) -> list[Any]:
    """Return `eos_token_id` of generation_config.json or config.json, unchecked. Raises: CheckpointError"""
    names = "generation_config.json", "config.json"
    generation, model = (read_json(checkpoint, name) for name in names)
    ids = generation.get("eos_token_id", model.get("eos_token_id"))
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def weight_shards(directory: Path) -> list[Path]:
    """Return the files that contain the weights. Raises: CheckpointError, if there are none, or one is missing"""
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        paths = sorted(directory.glob("*.safetensors"))
        if not paths:
            old = any(directory.glob("*.bin")) or any(directory.glob("*.pt*"))
            remedy = "convert its .bin files, which can run code when loaded" if old else "download the model again"
            raise CheckpointError(f"{directory} has no safetensors files; {remedy}")
        single = directory / "model.safetensors"
        return _downloaded([single] if single in paths else paths)
    check_pointer(index)
    try:
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(f"{index} cannot be read; download the model again") from error
    for name in names:
        if Path(name).name != name or not (directory / name).is_file():
            raise CheckpointError(f"{directory} has no {name}, which its index names; download the model again")
    return _downloaded([directory / name for name in names])


def _downloaded(paths: list[Path]) -> list[Path]:
    for path in paths:
        check_pointer(path)
    return paths


def adapter_digest(directory: Path) -> str:
    """Return the digest of a LoRA adapter's files, `LoRAAdapter.digest`. Raises: OSError"""
    digest = hashlib.sha256()
    for name in ("adapter_config.json", ADAPTER_WEIGHTS):
        with (directory / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
