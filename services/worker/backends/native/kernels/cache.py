"""Where compiled kernels are kept, so that only the first start on a machine compiles them (some seconds).

numba looks at one source file only when it decides whether a compiled kernel is still good; ours share helpers. So the
directory's name holds a digest of all of them.
"""

import hashlib
import os
import tempfile
from pathlib import Path


def directory() -> Path:
    """NUMBA_CACHE_DIR if it is set; else beside the kernels, or in the user's cache directory, or, where neither can be
    written, in a private directory of this process that spares later processes nothing."""
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(chosen)
    here = Path(__file__).parent
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(here.glob("*.py")))).hexdigest()[
        :16
    ]
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    for base in (here / "__pycache__", home / "runahead"):
        place = base / f"kernels-{digest}"
        if _writable(place):
            return place
    return Path(tempfile.mkdtemp(prefix="runahead-kernels-"))


def _writable(place: Path) -> bool:
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(place, os.W_OK | os.X_OK)
