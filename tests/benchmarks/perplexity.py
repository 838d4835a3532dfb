"""Perplexity of the products with quantised weights, beside that of the same file dequantised to float32.

The packaged SmolLM2-135M-Instruct is written in each format. K-quants need rows of a multiple of 256, so it gets
channels and heads of zeros, 768 channels instead of 576, and computes the same function. The `gguf` package encodes
what it can; the other formats are rounded to the nearest codes with scales of the largest weight of each group.
"""

import argparse
import math
import tempfile
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import IQ4_NL, dequantize, quantize
from numpy.typing import NDArray
from tokenizers import Tokenizer

from protocol.sampling import SamplingParams
from services.checkpoint import read_text
from services.checkpoint.default_model import packaged_model
from services.worker.kernels.cpu.compiled.block_formats import FORMATS
from tests.benchmarks.support.report import add_ints, report, skip
from tests.integration.native.driver import RunnerDriver

TEXT = Path(__file__).parent / "prose_and_code.txt"
WIDER = {576: 768, 192: 256}
"""Channels and those of all KV heads, and multiples of 256."""
AFTER_NORMS = tuple(f"{name}.weight" for name in ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up", "output_norm"))
"""Weights that take the factor of norms over more channels: the norms' own stay numbers that bfloat16 has."""
EPSILON = "llama.attention.layer_norm_rms_epsilon"
RUNS = {"float32": {"dtype": "float32"}, "bfloat16": {"dtype": "bfloat16"}}
PLAIN = {"dtype": "float32", "quantization": "none"}
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=list(FORMATS))
    add_ints(parser, tokens=2048, threads=2)
    args = parser.parse_args()
    packaged = packaged_model()
    if packaged is None:
        skip("the default model is not installed; run `make`")
    tokenizer = Tokenizer.from_str(read_text(packaged, "tokenizer.json") or "")
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8")).ids[: args.tokens]
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as directory:
        for kind in args.formats:
            path = Path(directory) / f"{kind}.gguf"
            write(packaged, path, kind)
            plain = perplexity(path, ids, args.threads, PLAIN)
            found = {name: perplexity(path, ids, args.threads, run) for name, run in RUNS.items()}
            rows.append(
                {"format": kind, "dequantised": plain, **{name: 100 * x / plain - 100 for name, x in found.items()}}
            )
            path.unlink()
    worst = {name: max((float(str(row[name])) for row in rows), key=abs) for name in RUNS}
    title = "Perplexity, and the difference of the products from it in per cent, by the dtype of the server"
    report("perplexity", title, rows, worst, vars(args), rows)


def perplexity(path: Path, ids: list[int], threads: int, config: dict[str, str]) -> float:
    driver = RunnerDriver(path, 16, keeps_logits=False, threads=threads, weights_cache_dir="none", **config)
    scored = driver.add(ids, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
    driver.generate([scored], 1, chunk=512)
    driver.runner.shutdown()
    return math.exp(-np.mean([scored.scores[position].values[0] for position in range(1, len(ids))]))


def write(source: Path, path: Path, kind: str) -> None:
    """Write the model `source` with matrices in the format `kind`."""
    reader, writer = GGUFReader(source), GGUFWriter(path, "llama")
    share = 576 / WIDER[576]
    sizes = {
        "llama.embedding_length": WIDER[576],
        "llama.attention.head_count": 12,
        "llama.attention.head_count_kv": 4,
        # The mean of squares is over more channels
        EPSILON: share * reader.fields[EPSILON].contents(),
    }
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            value = sizes.get(name, field.contents())
            writer.add_key_value(name, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        values = np.pad(values, [(0, WIDER.get(size, size) - size) for size in values.shape])
        if tensor.name.endswith(AFTER_NORMS):
            values = values * np.float32(math.sqrt(share))
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, encoded(values, kind), raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def encoded(values: Floats, kind: str) -> Bytes:
    """Return the rows of `values` as blocks of a format: [rows, bytes of a row]."""
    encode = {"Q4_K": _k_with_minima, "Q5_K": _k_with_minima, "Q6_K": _q6_k, "IQ4_XS": _iq4_xs}.get(kind)
    if encode is None:
        return quantize(values, GGMLQuantizationType[kind])
    rows = max(1, (1 << 22) // values.shape[1])
    parts = [encode(values[first : first + rows].reshape(-1, 256), kind) for first in range(0, len(values), rows)]
    return np.concatenate(parts).reshape(len(values), -1)


def _half(values: Floats) -> tuple[Bytes, Floats]:
    """Return float16 numbers as bytes, and their values; zeros become ones, which change no weight."""
    halves = np.where(values > 0, values, 1).astype(np.float16)[:, None]
    return halves.view(np.uint8), halves.astype(np.float32)


def _over(values: Floats, scales: Floats) -> Floats:
    return np.divide(values, scales, out=np.zeros_like(values), where=scales > 0)


def _k_with_minima(blocks: Floats, kind: str) -> Bytes:
    largest = 15 if kind == "Q4_K" else 31
    groups = blocks.reshape(-1, 8, 32)
    low = -np.minimum(groups.min(2), 0)
    steps = (np.maximum(groups.max(2), 0) + low) / largest
    (scale, d), (minimum, m) = _half(steps.max(1) / 63), _half(low.max(1) / 63)
    steps, low = (np.rint(part / unit).clip(0, 63).astype(np.uint8) for part, unit in ((steps, d), (low, m)))
    codes = np.rint(_over(groups + (m * low)[..., None], np.broadcast_to((d * steps)[..., None], groups.shape)))
    codes = codes.clip(0, largest).astype(np.uint8)
    both = steps[:, 4:] & 15 | low[:, 4:] << 4
    scales = [steps[:, :4] | steps[:, 4:] >> 4 << 6, low[:, :4] | low[:, 4:] >> 4 << 6, both]
    high = [] if kind == "Q4_K" else [np.packbits(codes >> 4, axis=1, bitorder="little")[:, 0]]
    words = codes[:, 0::2] & 15 | (codes[:, 1::2] & 15) << 4
    return np.concatenate([scale, minimum, *scales, *high, words.reshape(-1, 128)], axis=1)


def _q6_k(blocks: Floats, kind: str) -> Bytes:
    groups = blocks.reshape(-1, 16, 16)
    steps = abs(groups).max(2) / 31
    half, d = _half(steps.max(1) / 127)
    steps = np.rint(steps / d).clip(0, 127)
    codes = np.rint(_over(groups, np.broadcast_to((d * steps)[..., None], groups.shape))).clip(-32, 31) + 32
    parts = codes.astype(np.uint8).reshape(-1, 2, 4, 32)
    low = (parts[:, :, :2] & 15 | (parts[:, :, 2:] & 15) << 4).reshape(-1, 128)
    high = np.bitwise_or.reduce(parts >> 4 << np.arange(0, 8, 2, dtype=np.uint8)[:, None], axis=2).reshape(-1, 64)
    return np.concatenate([low, high, steps.astype(np.uint8), half], axis=1)


def _iq4_xs(blocks: Floats, kind: str) -> Bytes:
    groups, table = blocks.reshape(-1, 8, 32), np.array(IQ4_NL.kvalues, np.float32)
    steps = abs(groups).max(2) / 120  # between both ends of the table
    half, d = _half(steps.max(1) / 31)
    steps = np.rint(steps / d).clip(0, 31)
    scaled = _over(groups, np.broadcast_to((d * steps)[..., None], groups.shape))
    codes = np.searchsorted((table[1:] + table[:-1]) / 2, scaled).astype(np.uint8)
    stored = steps.astype(np.uint16) + 32
    upper = np.bitwise_or.reduce(stored >> 4 << np.arange(0, 16, 2, dtype=np.uint16), axis=1)[:, None].view(np.uint8)
    lower = (stored[:, 0::2] & 15 | (stored[:, 1::2] & 15) << 4).astype(np.uint8)
    words = (codes[..., :16] | codes[..., 16:] << 4).reshape(-1, 128)
    return np.concatenate([half, upper, lower, words], axis=1)
