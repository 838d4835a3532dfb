"""Files of LoRA adapters are checked before a worker meets them."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from protocol.lora import LoRAAdapter, salt_of
from services.checkpoint import ADAPTER_WEIGHTS, CheckpointError
from services.frontend.adapters import Adapters
from services.frontend.errors import APIError

MODULE = "model.layers.0.self_attn.q_proj."
FITTING = {f"base_model.model.{MODULE}lora_A.weight": (4, 8), f"base_model.model.{MODULE}lora_B.weight": (6, 4)}


def write(file: Path, shapes: dict[str, tuple[int, ...]], missing: int = 0) -> None:
    """Write a safetensors file with zeros, without its last bytes."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        size = 4 * shape[0] * shape[-1]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end - missing))


def adapter(directory: Path, shapes: dict[str, tuple[int, ...]] = FITTING, missing: int = 0, **changes: Any) -> str:
    directory.mkdir()
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, **changes}))
    write(directory / ADAPTER_WEIGHTS, shapes, missing)
    return str(directory)


@pytest.fixture
def adapters(tmp_path: Path) -> Adapters:
    base = tmp_path / "base"
    base.mkdir()
    write(base / "model.safetensors", {f"{MODULE}weight": (6, 8)})
    return Adapters(base, 8, ("base",))


def test_an_adapter_that_fits_is_served_until_it_is_unloaded(adapters: Adapters, tmp_path: Path) -> None:
    loaded = adapters.load("a", adapter(tmp_path / "a"))
    assert (adapters.names, adapters.get("a")) == (["a"], loaded)
    adapters.unload("a")
    assert adapters.get("a") is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"r": 9}, "rank 9"),
        ({"r": "4"}, "no adapter_config"),
        ({"peft_type": "IA3"}, "no adapter_config"),
        ({"use_dora": True}, "use_dora"),
        ({"missing": 1}, "cannot be read"),
        ({"shapes": {}}, "no tensors"),
        ({"shapes": {"x": (4, 4)}}, "no tensor of LoRA"),
        ({"r": 5}, "not of rank 5"),
        ({"shapes": {name: (shape[0], shape[1] * 2) for name, shape in FITTING.items()}}, "rank|another model"),
        ({"shapes": FITTING | {name.replace("0", "1"): shape for name, shape in FITTING.items()}}, "another model"),
        ({"shapes": FITTING | {[*FITTING][1]: (7, 4)}}, "another model"),
    ],
)  # fmt: skip
def test_others_are_refused(adapters: Adapters, tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(CheckpointError, match=why):
        adapters.load("a", adapter(tmp_path / "a", **changes))
    assert not adapters.names


def test_modules_that_the_model_does_not_serve_are_refused(adapters: Adapters, tmp_path: Path) -> None:
    loaded = adapters.load("a", adapter(tmp_path / "a"))
    adapters.check_modules(loaded, ())
    adapters.check_modules(loaded, ("k_proj", "q_proj"))
    with pytest.raises(APIError, match="changes q_proj, but adapters of this model can change only k_proj, v_proj"):
        adapters.check_modules(loaded, ("k_proj", "v_proj"))


def test_a_name_belongs_to_one_model(adapters: Adapters, tmp_path: Path) -> None:
    path = adapter(tmp_path / "a")
    adapters.load("a", path)
    for name in ("a", "base", "", "x" * 257):
        with pytest.raises(CheckpointError, match="name"):
            adapters.load(name, path)
    with pytest.raises(CheckpointError, match="--enable-lora"):
        Adapters().load("b", path)


def test_other_files_are_another_adapter_under_another_salt(adapters: Adapters, tmp_path: Path) -> None:
    first, same = (adapters.load(name, adapter(tmp_path / name)) for name in "ab")
    other = adapters.load("c", adapter(tmp_path / "c", lora_alpha=2))
    assert first.digest == same.digest != other.digest
    assert first.number != other.number


def test_no_salt_of_a_request_is_that_of_an_adapter() -> None:
    a = LoRAAdapter("a", "/a", "ab" * 32)
    salts = ("", "x", "\0", f"\0{a.digest}:", f"{a.digest}:", f"\0\0{a.digest}:")
    found = [salt_of(lora, salt) for lora in (None, a) for salt in salts]
    assert len({*found}) == len(found)
