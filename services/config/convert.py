"""Settings of the conversion of checkpoints."""

from typing import Literal

from pydantic import Field

from services.config.base import BaseConfig


class ConvertConfig(BaseConfig):
    """Settings of `runahead convert`."""

    model: str = Field(
        "", description="GGUF file, or a directory or Hugging Face repository with one. Default: SmolLM2-135M-Instruct."
    )
    revision: str | None = Field(None, description="Branch, tag or commit on the hub. Default: the main branch.")
    out: str = Field(
        "", description="Directory to write, empty or new. Default: one per file in the user's cache directory."
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Data type of the weights. auto: the file's; bfloat16 for quantised weights."
    )
