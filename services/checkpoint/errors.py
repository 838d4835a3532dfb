"""The error of everything that reads a checkpoint."""


class CheckpointError(Exception):
    """The checkpoint cannot be found or read. The text is one line with the reason and the remedy."""


class BrokenFileError(CheckpointError):
    """The content contradicts the file's format. Only used between the parts of a reader, which name the file."""
