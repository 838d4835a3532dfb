"""Files of a checkpoint: a directory, the Hugging Face hub (or its cache), or the demo model.

Frontends read the tokenizer, workers the weights; this module also reads the files that both need. Access to the hub
follows its own environment variables: HF_HOME, HF_HUB_OFFLINE, HF_TOKEN. No code is loaded from a checkpoint.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DEMO_MODEL = Path(__file__).resolve().parents[1] / "deploy" / "demo_model"
"""Directory of the model that is served by default."""
CONFIG_FILES = ("*.json",)
WEIGHT_FILES = (*CONFIG_FILES, "*.safetensors")
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class CheckpointError(Exception):
    """The checkpoint cannot be found or read. The text is one line with the reason and the remedy."""


def resolve(model: str, revision: str | None = None, patterns: Sequence[str] = CONFIG_FILES) -> Path:
    """Return the directory with the files of `model`, downloaded first if it is a name on the hub.

    Args:
        model: a directory, `organisation/name` on the hub, or "" for the demo model.
        revision: branch, tag or commit on the hub, for every file; unused for a directory.
        patterns: globs of the files to download; unused for a directory.

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
    """Return the data type of `--dtype auto`, or None for that of the checkpoint.

    The demo model is served in float32, so that equal requests get equal outputs in any batch.
    """
    return "float32" if not model or Path(model).expanduser().resolve() == DEMO_MODEL else None


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, or an empty one if the file does not exist. Raises: CheckpointError"""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not contain a JSON object")
    return content


def special_tokens(directory: Path) -> dict[str, str]:
    """Return the texts of the special tokens by their names in chat templates. Raises: CheckpointError"""
    config = read_json(directory / "special_tokens_map.json") | read_json(directory / "tokenizer_config.json")
    tokens = {name: config.get(name) for name in _SPECIAL}
    texts = {name: t.get("content") if isinstance(t, dict) else t for name, t in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str) and text}


def named_eos(directory: Path) -> list[Any]:
    """Return `eos_token_id` of generation_config.json or config.json, unchecked. Raises: CheckpointError"""
    generation, model = (read_json(directory / f"{name}.json") for name in ("generation_config", "config"))
    ids = generation.get("eos_token_id", model.get("eos_token_id"))
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def _directory(path: Path, problem: str) -> Path:
    if not path.is_dir():
        raise CheckpointError(
            f"{problem} {path}; give a directory in Hugging Face format or a name on the hub"
        )
    return path


def _download(name: str, revision: str | None, patterns: Sequence[str]) -> Path:
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
