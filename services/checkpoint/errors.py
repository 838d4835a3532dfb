"""Errors of reading a checkpoint."""


class CheckpointError(Exception):
    """The checkpoint cannot be found or read. The text is one line with the reason and the remedy."""


class BrokenFileError(CheckpointError):
    """The content contradicts the file's format. Used inside a reader, which adds the name of the file."""
