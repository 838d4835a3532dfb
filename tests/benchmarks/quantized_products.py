"""Time of our products with bfloat16, int8 and int4 weights, over oneDNN's in bfloat16.

Every product has enough weights one after the other that none stays in the caches between two calls. All kinds run in
turn in one process, and oneDNN runs twice, so that the noise is visible.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from services.worker.kernels.quantized_weight import Weight, quantized
from services.worker.kernels.selection import choose, create, processor_features
from tests.benchmarks.support.bare_torch import bfloat16_supported, pack_weight, packed_product
from tests.benchmarks.support.report import report, skip

SHAPES = {"m155 gate_up": (8192, 1024), "m155 down": (1024, 4096)}
"""Outputs and inputs."""
ROWS = (1, 4, 8, 16, 64, 256)
BYTES = 128 << 20
"""Weights of one product in bfloat16, together."""


Product = Callable[[torch.Tensor, torch.Tensor], object]


class ProductKind(NamedTuple):
    activations: torch.dtype
    torch_threads: int
    product: Callable[[torch.Tensor], Product]
    """Makes a product of a weight in bfloat16."""


def ways(threads: int) -> dict[str, ProductKind]:
    own = create(choose("compiled", "cpu", torch.bfloat16, processor_features()))
    own.use_threads(threads)

    def onednn(weight: torch.Tensor) -> Product:
        packed = pack_weight(weight, None)
        return lambda x, _: packed_product(x, packed, None, "none", [], "")

    def ours(pack: Callable[[torch.Tensor], Weight]) -> ProductKind:
        return ProductKind(own.network.activations, 1, lambda weight: own.network.linear(pack(weight)))

    return {
        "oneDNN": ProductKind(torch.bfloat16, threads, onednn),
        "again": ProductKind(torch.bfloat16, threads, onednn),
        "bfloat16": ours(torch.clone),
        "int8": ours(lambda weight: quantized(weight, "int8")),
        "int4": ours(lambda weight: quantized(weight, "int4")),
    }


def pass_seconds(products: list[Product], x: torch.Tensor, out: torch.Tensor) -> float:
    started = time.perf_counter()
    for product in products:
        product(x, out)
    return (time.perf_counter() - started) / len(products)


def measured(shape: tuple[int, int], args: argparse.Namespace) -> dict[int, dict[str, float]]:
    """Return the median seconds of a product, by rows and kind."""
    outputs, inputs = shape
    weight, count = torch.randn(shape).bfloat16(), max(2, BYTES // (2 * outputs * inputs))
    made = {name: (way, [way.product(weight) for _ in range(count)]) for name, way in ways(args.threads).items()}
    seconds: dict[int, dict[str, float]] = {}
    for rows in ROWS:
        taken: dict[str, list[float]] = {name: [] for name in made}
        for _ in range(args.turns):
            for name, (way, products) in made.items():
                torch.set_num_threads(way.torch_threads)
                x, out = (
                    torch.randn(rows, inputs).to(way.activations),
                    torch.empty(rows, outputs, dtype=way.activations),
                )
                taken[name].append(pass_seconds(products, x, out))
        seconds[rows] = {name: statistics.median(times[1:]) for name, times in taken.items()}
    return seconds


@torch.inference_mode()
def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, default=4, help="the first one is not counted")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    args = parser.parse_args()
    if not bfloat16_supported():
        skip("oneDNN has no products in bfloat16 on this processor")
    rows: list[dict[str, object]] = []
    for shape in args.shapes:
        for number, seconds in measured(SHAPES[shape], args).items():
            base = seconds["oneDNN"]
            ratios = {f"{name} over it": value / base for name, value in seconds.items() if name != "oneDNN"}
            rows.append({"product": shape, "rows": number, "oneDNN us": base * 1e6, **ratios})
    worst = max(max(float(str(row[f"{kind} over it"])) for kind in ("int8", "int4")) for row in rows)
    title = "Products over oneDNN's in bfloat16, median of turns"
    report("quantized_products", title, rows, {"worst_over_onednn": worst}, vars(args), rows)
