"""GGUF files give the logits and the tokens of `transformers` with the dequantised weights."""

import os
import re
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from services.checkpoint.gguf.tensor_types import TENSOR_TYPES
from services.cli.app import run
from services.worker.backends.native.model.config import ModelConfig
from services.worker.backends.native.model.loading import has_blocks
from services.worker.runner import LoadError
from services.worker.weights import conversion, model_digest, open_checkpoint
from services.worker.weights.conversion import convert
from tests.integration.native import gguf_models
from tests.integration.native.driver import RunnerDriver

PROMPT = [5, 9, 250, 17, 3, 3, 88, 101, 42, 7]
STEPS = 8
CASES = [(t.name, "llama-wide" if t.block_elements == 256 else "llama") for t in TENSOR_TYPES.values()]
CASES += [("Q8_0", name) for name in gguf_models.MODELS if name not in ("llama", "llama-wide", "llama-biased")]
CASES += [("F16", "llama-biased"), ("MXFP4", "gpt-oss")]


@pytest.mark.parametrize(("kind", "name"), CASES, ids=lambda value: value)
def test_logits_and_greedy_tokens(kind: str, name: str, tmp_path: Path) -> None:
    family = gguf_models.write(tmp_path / "model.gguf", name, kind)
    driver = RunnerDriver(family.path, dtype="float32")
    request = driver.add(PROMPT)
    driver.generate([request], STEPS)
    tokens, logits = family.reference(PROMPT, STEPS, request.output)
    assert request.output == tokens
    quantised = has_blocks(open_checkpoint(family.path), ModelConfig.from_checkpoint(family.path))
    assert quantised == (kind not in ("F32", "F16", "BF16"))
    # Activations are rounded to whole numbers before they are multiplied with quantised weights
    close = 1e-2 if quantised else 2e-3
    torch.testing.assert_close(torch.cat(driver.logits), logits, atol=close, rtol=1e-4)
    driver.runner.shutdown()


@pytest.mark.parametrize("name", gguf_models.MODELS)
@torch.no_grad()
def test_a_converted_file_is_a_checkpoint_of_transformers(name: str, tmp_path: Path) -> None:
    family, converted = gguf_models.write(tmp_path / "model.gguf", name, "F32"), tmp_path / "converted"
    if name in ("granitemoe", "gpt-oss", "llama4"):
        with pytest.raises(LoadError, match=f"the experts of {name} are stored in another way"):
            convert(family.path, converted)
        return
    convert(family.path, converted)
    model = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.float32)
    prompt = torch.tensor([PROMPT])
    assert torch.equal(model(prompt).logits, family.model(prompt).logits)


@pytest.mark.parametrize("kind", ["F32", "Q4_1", "Q8_0"])
def test_part_of_a_tensor_is_that_part_of_the_whole(kind: str, tmp_path: Path) -> None:
    family = gguf_models.write(tmp_path / "model.gguf", "llama", kind)
    checkpoint = open_checkpoint(family.path)
    for name, parameter in family.model.named_parameters():
        shape = tuple(parameter.shape)
        assert torch.equal(checkpoint.take(name, shape, torch.float32), parameter)
        rows = slice(shape[0] // 4, shape[0] // 2)
        assert torch.equal(checkpoint.take(name, shape, torch.float32, (rows,)), parameter[rows])
        if len(shape) == 2:
            columns = slice(9, 50)  # divides blocks
            part = checkpoint.take(name, shape, torch.bfloat16, (rows, columns))
            assert torch.equal(part, parameter[rows, columns].bfloat16())
            assert checkpoint.blocks(name, shape, (rows, columns)) is None


def test_blocks_are_rows_of_the_file_in_the_order_of_the_tensor(tmp_path: Path) -> None:
    family = gguf_models.write(tmp_path / "model.gguf", "llama", "Q4_0")
    checkpoint = open_checkpoint(family.path)
    name, shape = "model.layers.1.self_attn.q_proj.weight", (64, 64)
    blocks = checkpoint.blocks(name, shape, (slice(4, 12), slice(32, 64)))
    assert (blocks.kind, blocks.rows.shape, blocks.rows.dtype) == ("Q4_0", (8, 18), torch.uint8)
    factors = blocks.rows[:, :2].contiguous().view(torch.float16).float()
    nibbles = torch.cat([blocks.rows[:, 2:] & 15, blocks.rows[:, 2:] >> 4], dim=1).float() - 8
    whole = dict(family.model.named_parameters())[name]
    assert torch.equal(factors * nibbles, whole[4:12, 32:])
    assert checkpoint.blocks("model.norm.weight", (64,)) is None


def test_digest_depends_on_types_and_configuration(tmp_path: Path) -> None:
    paths = [tmp_path / f"{kind}.gguf" for kind in ("Q8_0", "Q4_0")]
    for path in paths:
        gguf_models.write(path, "llama", path.stem)
    first, second = (model_digest(path, open_checkpoint(path)) for path in paths)
    assert first != second
    gguf_models.write(paths[0], "llama", "Q8_0")
    assert model_digest(paths[0], open_checkpoint(paths[0])) == first


def test_missing_tensor_and_other_shape_are_refused(tmp_path: Path) -> None:
    family = gguf_models.write(tmp_path / "model.gguf", "llama", "Q8_0")
    checkpoint = open_checkpoint(family.path)
    with pytest.raises(LoadError, match=r"no tensor lm_head.weight"):
        checkpoint.take("lm_head.weight", (260, 64), torch.float32)
    with pytest.raises(LoadError, match=r"model.norm.weight is \[64\], but config.json says \[65\]"):
        checkpoint.blocks("model.norm.weight", (65,))


def test_convert_names_what_it_has_written_and_keeps_it_until_the_file_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several files of weights, each of which others may read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(conversion, "_SHARD_BYTES", 1 << 16)
    family = gguf_models.write(tmp_path / "model.gguf", "llama", "F16")

    def converted(*options: str) -> tuple[Path, str]:
        assert run(["convert", str(family.path), *options]) == 0
        printed = capsys.readouterr()
        directory, (said, _, files) = Path(printed.out.removesuffix("\n")), printed.err.splitlines()[-1].partition(": ")
        assert {file.name for file in directory.iterdir()} == set(re.findall(r"([\w.-]+) \([\d.]+ \w+\)", files))
        return directory, said

    directory, said = converted("--dtype", "float32")
    assert said == "written"
    assert converted("--dtype", "float32") == (directory, "kept from an earlier conversion")
    weights = [*directory.glob("*.safetensors")]
    assert max(file.stat().st_size for file in weights) < 1 << 18 < sum(file.stat().st_size for file in weights)
    assert [path.stat().st_mode & 0o777 for path in (directory, *weights)] == [0o755, *[0o644] * len(weights)]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    assert all(map(torch.equal, model.parameters(), family.model.parameters()))
    assert run(["convert", str(family.path), "--out", str(directory)]) == 2
    assert f"{directory} is not empty; name another directory" in capsys.readouterr().err
    assert converted("--out", str(tmp_path / "out")) == (tmp_path / "out", "written")
    os.utime(family.path, (1, 1))
    other = converted("--dtype", "float32")[0]
    assert len({directory, other, converted()[0]}) == 3
    for path, read in ((directory, 0.0), (other, time.time())):
        os.utime(path, (read, 0.0))
    last = converted()[0]
    assert {*last.parent.iterdir()} == {last, other}, "one that nobody has used or read for long is removed"
