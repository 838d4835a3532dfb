"""Models that compute a vector from a prompt and generate no text: they embed, classify or score."""

from typing import Annotated, Literal

import msgspec

from protocol.fields import MAX_ITEMS, Count, Text

PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]
"""Compute an embedding, or a number per class, of the whole prompt or of each token."""


class PoolingModel(msgspec.Struct, array_like=True, frozen=True):
    """A model with a pooler of its own."""

    task: PoolingTask
    size: Count
    """Numbers of a vector: the length of an embedding, or the number of classes."""
    whole_prompts: bool = False
    """True: a prompt must be computed in one step, and reads no prefix cache (whole prompt)."""
    labels: Annotated[list[Text], msgspec.Meta(max_length=MAX_ITEMS)] = []
    """Names of the first classes; "": it has none."""
    dimensions: Annotated[list[Count], msgspec.Meta(max_length=MAX_ITEMS)] | None = None
    """Lengths to which an embedding can be shortened; []: any; None: none."""
    separates_pairs: bool = True
    """The two texts of a pair are separated by the tokenizer's special tokens, not concatenated."""

    @property
    def is_tokenwise(self) -> bool:
        return self.task.startswith("token_")

    def has_length(self, dimensions: int) -> bool:
        """Return whether an embedding can have so many numbers in place of `size`."""
        if self.dimensions is None or not 0 < dimensions <= self.size:
            return False
        return not self.dimensions or dimensions in self.dimensions


class PoolingParams(msgspec.Struct, array_like=True, frozen=True):
    """Parameters of one request to a `PoolingModel`."""

    use_activation: bool | None = None
    """Apply the model's last function, such as the norm of an embedding or the softmax of classes; None: its default.
    """
    dimensions: Count = 0
    """Length of the embedding; 0: that of the model."""
    second_text: Count | None = None
    """Index of the first token of the second text of a pair; None: there is one text."""
