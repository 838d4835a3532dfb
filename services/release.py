"""Versions of this project and of other packages."""

from functools import cache
from importlib import metadata

DISTRIBUTION = "runahead-engine"
NOT_INSTALLED = "0+source"
"""Version of a source tree that runs without being installed, as on a GPU machine without network."""


def installed(package: str) -> str:
    """Return the version of an installed package; "" if it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


@cache  # the first call reads files
def version() -> str:
    """Return the version of this project."""
    return installed(DISTRIBUTION) or NOT_INSTALLED
