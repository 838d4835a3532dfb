"""`runahead convert`: a GGUF file as a checkpoint in Hugging Face format."""

import os
import sys
from pathlib import Path

from services.checkpoint import WEIGHT_FILES, CheckpointError, is_gguf, resolve
from services.checkpoint.gguf import read_header
from services.cli.settings import refusing
from services.config import ConvertConfig
from services.units import size_text


def convert(config: ConvertConfig) -> int:
    """Convert, print the directory, and its files on stderr. Return the exit status.

    Raises: ConfigurationError, if the model cannot be converted.
    """
    with refusing(CheckpointError, OSError):
        path = resolve(config.model, config.revision, WEIGHT_FILES)
        if is_gguf(path):
            read_header(path)  # refused in less time than torch takes to load
    from services.worker.runner import LoadError
    from services.worker.weights import conversion  # loads torch

    is_new = True
    with refusing(CheckpointError, LoadError, OSError):
        if config.out:
            directory = Path(os.path.expanduser(config.out))
            conversion.convert(path, directory, config.dtype)
        else:
            directory = conversion.cache_directory(path, config.dtype)
            if is_new := not directory.is_dir():
                conversion.convert(path, directory, config.dtype)
    print(directory)
    files = sorted(file for file in directory.iterdir() if file.is_file())
    print(
        f"{'written' if is_new else 'kept from an earlier conversion'}: "
        + ", ".join(f"{file.name} ({size_text(file.stat().st_size)})" for file in files),
        file=sys.stderr,
    )
    return 0
