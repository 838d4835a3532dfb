"""Where compiled kernels are kept, so that only the first start on a machine compiles them (some seconds).

numba looks at one source file only when it decides whether a compiled kernel is still good; ours share helpers. So the
directory's name holds a digest of all of them.
"""

import atexit
import hashlib
import os
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path

from services.private import private_directory

PRIVATE = "runahead-kernels-"
"""How the name of a directory begins that a process has for itself."""


def directory() -> Path:
    """NUMBA_CACHE_DIR if it is set; else beside the kernels, or in the user's cache directory, or, where neither can be
    written, in a private directory that goes with this process and spares later ones nothing.

    numba wants to write where it reads. So what was compiled beside the kernels when they were installed, by someone
    else or in a read-only image, is copied to the place that can be written."""
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(chosen)
    here = Path(__file__).parent
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(here.rglob("*.py")))).hexdigest()[
        :16
    ]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    beside, cached = here / "__pycache__" / f"kernels-{digest}", home / "runahead" / f"kernels-{digest}"
    if _writable(beside):
        return beside
    if not cached.exists():
        _copy(beside, cached)
    if _writable(cached):
        return cached
    held = ExitStack()
    private = held.enter_context(private_directory(Path(tempfile.gettempdir()), PRIVATE))
    atexit.register(held.close)
    if beside.is_dir():
        shutil.copytree(beside, private, dirs_exist_ok=True)
    return private


def _copy(compiled: Path, place: Path) -> None:
    """Whole or not at all, although several workers may start at once."""
    if not compiled.is_dir():
        return
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=PRIVATE, dir=place.parent) as scratch:
            shutil.copytree(compiled, Path(scratch) / "copy")
            (Path(scratch) / "copy").rename(place)
    except OSError:  # nothing can be written here, or another worker was first
        return


def _writable(place: Path) -> bool:
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(place, os.W_OK | os.X_OK)
