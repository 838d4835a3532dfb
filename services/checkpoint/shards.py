"""The safetensors files of a checkpoint in Hugging Face format."""

import json
from pathlib import Path

from services.checkpoint.errors import CheckpointError


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
        return [single] if single in paths else paths
    try:
        names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(f"{index} cannot be read; download the model again") from error
    for name in names:
        if Path(name).name != name or not (directory / name).is_file():
            raise CheckpointError(f"{directory} has no {name}, which its index names; download the model again")
    return [directory / name for name in names]
