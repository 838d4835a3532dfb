"""The version of this project."""

from functools import cache
from importlib import metadata

DISTRIBUTION = "runahead-engine"
NOT_INSTALLED = "0+source"
"""Version of a source tree that runs without being installed, as on a GPU machine without network."""


@cache  # the first call reads files
def version() -> str:
    """Return the version of the installed distribution."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return NOT_INSTALLED
