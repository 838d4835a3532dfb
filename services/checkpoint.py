"""Where a checkpoint's files are: a directory, the Hugging Face hub (or its cache), or the demo model.

Frontends read the tokenizer from here and workers the weights. Hub access follows the hub's own environment
variables: HF_HOME, HF_HUB_OFFLINE, HF_TOKEN. No code is ever loaded from a checkpoint.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

DEMO_MODEL = Path(__file__).resolve().parents[1] / "deploy" / "demo_model"
"""What is served when no model is named."""
CONFIG_FILES = ("*.json",)
WEIGHT_FILES = (*CONFIG_FILES, "*.safetensors")


class CheckpointError(Exception):
    """A model that cannot be found; one line that says what is wrong and what to do."""


def resolve(model: str, revision: str | None = None, patterns: Sequence[str] = CONFIG_FILES) -> Path:
    """The directory with the files of `model`, downloaded first if it is a name on the hub.

    Args:
        model: a directory, `organisation/name` on the hub, or "" for the demo model.
        revision: branch, tag or commit on the hub, for every file; a directory has none.
        patterns: globs of the files to download; a directory is taken as it is.

    Raises:
        CheckpointError: no such directory or repository, no access to it, or it was never downloaded and the
            hub cannot be reached.
    """
    if not model:
        return _directory(DEMO_MODEL, "the demo model is missing at")
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1 or path.exists():
        return _directory(path, "no such model directory:")
    return _download(model, revision, patterns)


def default_dtype(model: str) -> str | None:
    """What `--dtype auto` means for a model that has a preference of its own: the demo model is served in float32,
    where equal requests get equal answers; None leaves it to the checkpoint."""
    return "float32" if not model or Path(model).expanduser().resolve() == DEMO_MODEL else None


def _directory(path: Path, problem: str) -> Path:
    if not path.is_dir():
        raise CheckpointError(
            f"{problem} {path}; give a directory in Hugging Face format or a name on the hub"
        )
    return path


def _download(name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    from huggingface_hub import errors as hub
    from huggingface_hub import snapshot_download  # half a second that a directory does not need
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    at = f"{name} (revision {revision})" if revision else name
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except hub.GatedRepoError:
        problem = "access is restricted; accept its terms on the hub and set HF_TOKEN"
    except hub.RevisionNotFoundError:
        problem = "no such revision; check --revision"
    except hub.RepositoryNotFoundError:
        problem = (
            "no such directory or repository on the hub; check the name, or set HF_TOKEN if it is private"
        )
    except hub.HFValidationError:
        problem = "no such directory, and not a valid name on the hub"
    except (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled):
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
        why = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
        problem = (
            f"no such directory, not in the hub's cache, and {why}; download it first or give a directory"
        )
    except (OSError, hub.HfHubHTTPError) as error:
        problem = f"the download failed: {' '.join(str(error).split())}"
    raise CheckpointError(f"model {at}: {problem}")
