"""`runahead convert`: a GGUF file as a checkpoint in Hugging Face format."""

from pathlib import Path

from services.checkpoint import WEIGHT_FILES, CheckpointError, resolve
from services.cli.settings import ConfigurationError
from services.config import ConvertConfig


def convert(config: ConvertConfig) -> int:
    """Convert, and print the directory. Return the exit status.

    Raises: ConfigurationError, if the model cannot be converted.
    """
    from services.worker.runner import LoadError
    from services.worker.weights import conversion  # loads torch

    try:
        path = resolve(config.model, config.revision, WEIGHT_FILES)
        if config.out:
            directory = Path(config.out).expanduser()
            conversion.convert(path, directory, config.dtype)
        else:
            directory = conversion.cache_directory(path, config.dtype)
            if not directory.is_dir():
                conversion.convert(path, directory, config.dtype)
    except (CheckpointError, LoadError, OSError) as error:
        raise ConfigurationError(str(error)) from None
    print(directory)
    return 0
