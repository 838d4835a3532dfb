"""Images and sounds in a prompt: positions that a model fills with the output of its encoder in place of tokens'
embeddings."""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec

from protocol.fields import MAX_ITEMS, Count, Name, Text

MAX_FILES = 16
"""Images in a prompt, and sounds."""
MAX_MEDIA_BYTES = 32 << 20
"""Bytes of the tensors of one request."""


class MediaItem(msgspec.Struct, array_like=True, frozen=True):
    """One image or sound, and its positions in the prompt."""

    start: Count
    length: Count
    digest: Name
    """Hash of its content. Items of equal digest and length compute the same."""

    @property
    def end(self) -> int:
        return self.start + self.length


class Media(msgspec.Struct, array_like=True, frozen=True):
    items: Annotated[list[MediaItem], msgspec.Meta(max_length=MAX_ITEMS)]
    """In the order of their positions, which do not overlap."""
    data: Annotated[bytes, msgspec.Meta(max_length=MAX_MEDIA_BYTES)] = b""
    """Inputs of the encoder, one per item, in the backend's form."""


class MediaModel(msgspec.Struct, array_like=True, frozen=True):
    """A model that reads images or sounds."""

    dtype: Name
    """Data type of the encoder's inputs."""
    hf_overrides: Text = "{}"
    """Values in place of those of config.json, as JSON."""


# -- frontend and the process of the backend that computes inputs of the encoder ----------------------------------


class ProcessorSettings(msgspec.Struct, array_like=True, frozen=True):
    """First message to the process. It answers with `ProcessedMedia` without items, or `MediaFailed` and ends."""

    directory: Text
    """Directory of the checkpoint."""
    model: MediaModel


class MediaFile(msgspec.Struct, array_like=True, frozen=True):
    kind: Literal["image", "audio"]
    url: str
    """Data URL; in the frontend also an address."""


def named(files: Sequence[MediaFile]) -> dict[str, MediaFile]:
    """Return the files of a prompt by their names in errors, in order."""
    return {f"{file.kind} {number}": file for number, file in enumerate(files)}


class MediaJob(msgspec.Struct, array_like=True, frozen=True):
    token_ids: bytes
    """int32[tokens]: the prompt, in which a few tokens stand for each file."""
    files: list[MediaFile]


class ProcessedMedia(msgspec.Struct, array_like=True, frozen=True, tag="processed"):
    token_ids: bytes
    """int32[tokens]: the prompt with all positions of its files."""
    media: Media


class MediaRefused(msgspec.Struct, array_like=True, frozen=True, tag="refused"):
    """Something is wrong with the files of the request."""

    reason: Text


class MediaFailed(msgspec.Struct, array_like=True, frozen=True, tag="failed"):
    reason: Text


MediaOutcome = ProcessedMedia | MediaRefused | MediaFailed


def contents(items: Sequence[MediaItem], begin: int, end: int) -> bytes:
    """Return what the name of a block of these positions has besides its tokens, which are equal for all files."""
    found = (item for item in items if item.start < end and begin < item.end)
    return b"".join(f"{item.start}:{item.length}:{item.digest};".encode() for item in found)
