"""Conversion of a GGUF file to a checkpoint in Hugging Face format, for programs that read no GGUF files."""

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from services.checkpoint import is_gguf, read_text
from services.checkpoint.gguf import FILES, architecture, read_header, tensors_by_name
from services.private import user_cache, without_unused
from services.worker.runner import LoadError
from services.worker.weights.gguf_checkpoint import GgufCheckpoint

log = logging.getLogger("runahead.worker")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NAMES = (*FILES, "chat_template.jinja")
_FORMAT = 1
"""Part of the cache key; after an increment, older directories are not used any more."""
_SHARD_BYTES = 2 << 30
"""Size at which a file of weights ends. Its tensors are in memory until it is written."""


def cached_conversion(path: Path, dtype: str = "auto") -> Path:
    """Return the converted checkpoint of a GGUF file in the user's cache directory, converted first if needed.

    Args:
        dtype: as in `convert`.

    Raises: LoadError
    """
    directory = cache_directory(path, dtype)
    if not directory.is_dir():
        log.info("converting %s to %s, once", path, directory)
        try:
            convert(path, directory, dtype)
        except OSError as error:
            raise LoadError(
                f"{path} cannot be converted to {directory}: {error.strerror}; run `runahead convert {path} --out DIR` "
                "and serve DIR, or set XDG_CACHE_HOME"
            ) from error
    return directory


def cache_directory(path: Path, dtype: str) -> Path:
    """Return the directory of a conversion, for use: directories that are not used any more are removed. A changed file
    at the same path has another directory."""
    status = path.stat()
    key = f"{_FORMAT} {path.resolve()} {status.st_size} {status.st_mtime_ns} {dtype}"
    name = f"{path.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    return without_unused(user_cache() / "checkpoints" / name, "*", counts_reads=True)


def convert(path: Path, directory: Path, dtype: str = "auto") -> None:
    """Write all files of the checkpoint, or none.

    Args:
        directory: must not exist, or be empty.
        dtype: one of `DTYPES`, or "auto" for that of the file's config.json (bfloat16 for quantised weights).

    Raises:
        LoadError or CheckpointError: the file cannot be read or is not supported, or the directory is not empty.
        OSError: the directory cannot be written.
    """
    if not is_gguf(path):
        raise LoadError(f"{path} is not a GGUF file; a checkpoint in Hugging Face format needs no conversion")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise LoadError(f"{directory} is not empty; name another directory")
    header = read_header(path)
    if architecture(header).stacks_experts:
        raise LoadError(
            f"{path} cannot be converted: the experts of {header.architecture} are stored in another way; "
            "serve it with --backend native, or the original checkpoint"
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".convert-", dir=directory.parent))
    try:
        _write(path, scratch, dtype)
        scratch.chmod(0o755)
        _move(scratch, directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _move(scratch: Path, directory: Path) -> None:
    try:
        scratch.rename(directory)
    except OSError:  # another process was first
        if not (directory / "config.json").is_file():
            raise


def _write(path: Path, directory: Path, dtype: str) -> None:
    texts = {name: text for name in _NAMES if (text := read_text(path, name)) is not None}
    config = json.loads(texts["config.json"])
    if dtype != "auto":
        config["dtype"] = dtype
    texts["config.json"] = json.dumps(config, indent=2)
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8")
    places: dict[str, str] = {}
    for number, tensors in enumerate(_shards(path, DTYPES[config["dtype"]]), 1):
        file = f"model-{number:05}.safetensors"
        save_file(tensors, directory / file, {"format": "pt"})
        (directory / file).chmod(0o644)  # the library makes it readable for this user only
        places |= dict.fromkeys(tensors, file)
    if len(set(places.values())) == 1:
        (directory / "model-00001.safetensors").rename(directory / "model.safetensors")
    else:
        index = {"metadata": {}, "weight_map": places}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _shards(path: Path, dtype: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
    checkpoint = GgufCheckpoint(path)
    tensors: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors_by_name(read_header(path)).items():
        tensors[name] = checkpoint.take(name, tensor.shape, dtype).contiguous()
        size += tensors[name].nbytes
        if size >= _SHARD_BYTES:
            yield tensors
            tensors, size = {}, 0
    if tensors:
        yield tensors
