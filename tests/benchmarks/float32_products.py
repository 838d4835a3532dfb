"""Time of our own float32 products, narrow and for AVX-512, over torch's: all products of one step of a model.

Weights are bfloat16 numbers, as in the checkpoints; torch has them in float32. All kinds run in turn in one process;
the least time of each product counts, and a step is their sum.
"""

import argparse
import time
from collections.abc import Callable

import torch

from services.worker.kernels.cpu.launching import Launcher
from services.worker.kernels.cpu.products import PanelProduct, float32_panels
from services.worker.kernels.cpu.thread_team import set_num_threads
from services.worker.kernels.selection import WIDE, choose, processor_features
from tests.benchmarks.support.random_llama import SHAPES, VOCAB
from tests.benchmarks.support.report import report

Product = Callable[[torch.Tensor, torch.Tensor], object]
KINDS = ("torch", "narrow", "AVX-512")
LEAST_TURNS = 3


def shapes(model: str) -> list[tuple[int, int]]:
    """Return outputs and inputs of every product of a step."""
    config = SHAPES[model]
    hidden = config["hidden_size"]
    mlp, heads = config.get("intermediate_size", 3 * hidden), 64 * config["num_attention_heads"]
    qkv = heads + 2 * 64 * config["num_key_value_heads"]
    layer = [(qkv, hidden), (hidden, heads), (2 * mlp, hidden), (hidden, mlp)]
    return [*layer * config["num_hidden_layers"], (config.get("vocab_size", VOCAB), hidden)]


def products(shape: tuple[int, int]) -> dict[str, Product]:
    weight, launcher = torch.randn(shape).bfloat16().float(), Launcher()

    def torch_product(x: torch.Tensor, out: torch.Tensor) -> object:
        return torch.mm(x, weight.T, out=out)

    choices = (choose("compiled", "cpu", torch.float32, features) for features in ([], [WIDE]))
    ways = (PanelProduct(launcher, float32_panels(weight, choice.wide), None, choice) for choice in choices)
    return dict(zip(KINDS, (torch_product, *ways), strict=True))


def milliseconds(step: Product, x: torch.Tensor, out: torch.Tensor) -> float:
    started = time.perf_counter()
    step(x, out)
    return (time.perf_counter() - started) * 1e3


def measured(model: str, args: argparse.Namespace) -> list[dict[str, object]]:
    made = [(shape, products(shape)) for shape in shapes(model)]
    rows: list[dict[str, object]] = []
    for number in args.rows:
        operands = [(torch.randn(number, inputs), torch.empty(number, outputs)) for (outputs, inputs), _ in made]
        least = {kind: [float("inf")] * len(made) for kind in KINDS}
        turns, began = 0, time.monotonic()
        while turns < LEAST_TURNS or time.monotonic() - began < args.seconds:
            turns += 1
            for kind, times in least.items():
                torch.set_num_threads(args.threads if kind == "torch" else 1)
                for i, ((_, ways), (x, out)) in enumerate(zip(made, operands, strict=True)):
                    times[i] = min(times[i], milliseconds(ways[kind], x, out))
        step = {kind: sum(times) for kind, times in least.items()}
        ratios = {f"{kind} over it": step[kind] / step["torch"] for kind in KINDS[1:]}
        rows.append({"model": model, "rows": number, "torch, ms": step["torch"], **ratios})
    return rows


@torch.inference_mode()
def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3, help="for all kinds of one case")
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 16, 64, 256, 512])
    args = parser.parse_args()
    set_num_threads(args.threads)
    rows = [row for model in args.models for row in measured(model, args)]
    title = f"float32 products of a step over torch's, {args.threads} threads, least times"
    figures = {f"{row['model']} at {row['rows']}": row["AVX-512 over it"] for row in rows}
    settings = vars(args) | {"features": sorted(processor_features())}
    report("float32_products", title, rows, figures, settings, rows)
