"""Data type of a model that is served with `--dtype auto`."""

from pathlib import Path

from services.checkpoint.default_model import packaged_model
from services.checkpoint.location import DEMO_MODEL


def default_dtype(model: str) -> str | None:
    """Return the data type of `--dtype auto`, or None for that of the checkpoint.

    The demo model is served in float32, so that equal requests get equal outputs in any batch.
    """
    is_demo = packaged_model() is None if not model else Path(model).expanduser().resolve() == DEMO_MODEL
    return "float32" if is_demo else None
