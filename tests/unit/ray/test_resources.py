"""Bundles of engines, and what a cluster lacks."""

import pytest

from services.config import RayConfig
from services.ray.resources import bundles, engines_of_node, missing

FOUR, TWO = {"CPU": 4.0, "memory": 1e9}, {"CPU": 2.0}


def test_a_tensor_parallel_group_is_one_bundle_unless_its_ranks_are_spread() -> None:
    config = RayConfig(tensor_parallel_size=2, pipeline_parallel_size=3, threads=4)
    assert bundles(config) == [{"CPU": 8.0}, {"CPU": 8.0}, {"CPU": 8.0}, {"CPU": 1.0}]
    config = RayConfig(tensor_parallel_size=2, threads=2, placement_group_strategy="SPREAD")
    assert bundles(config) == [{"CPU": 2.0}, {"CPU": 2.0}, {"CPU": 1.0}]
    assert bundles(RayConfig(device="cuda"))[0] == {"CPU": 1.0, "GPU": 1.0}
    engines = RayConfig(tensor_parallel_size=2, data_parallel_size=4)
    assert [engines_of_node(engines, cpus) for cpus in (1.0, 4.0, 64.0)] == [1, 2, 4]


def test_nothing_is_missing() -> None:
    assert missing(RayConfig(tensor_parallel_size=2), [FOUR]) == ""
    assert missing(RayConfig(tensor_parallel_size=4), [FOUR, TWO]) == "", "just enough"
    assert missing(RayConfig(data_parallel_size=3), [FOUR, FOUR]) == ""
    three = RayConfig(tensor_parallel_size=2, data_parallel_size=2, api_server_count=3)
    assert missing(three, [FOUR, FOUR, FOUR]) == ""


@pytest.mark.parametrize(
    ("settings", "nodes", "parts"),
    [
        ({"tensor_parallel_size": 4, "threads": 2}, [FOUR, FOUR], ("10 CPUs", "4 CPUs + 4 CPUs", "too few CPUs")),
        ({"tensor_parallel_size": 4, "threads": 2}, [FOUR] * 3, ("8 CPUs on one node are free 0 times",)),
        ({"data_parallel_size": 4}, [FOUR, FOUR], ("4 engines of 1 rank and 1 frontend need 9 CPUs",)),
        ({"threads": 3, "data_parallel_size": 2}, [FOUR, *[TWO] * 4], ("3 CPUs on one node are free 1 times, not 2",)),
        ({"device": "cuda"}, [FOUR], ("1 GPU", "too few GPUs")),
        (
            {"device": "cuda", "data_parallel_size": 2}, [{"CPU": 1.0, "GPU": 2.0}, FOUR],
            ("1 CPU and 1 GPU on one node are free 1 times, not 2",),
        ),
        ({"tensor_parallel_size": 4, "placement_group_strategy": "STRICT_PACK"}, [FOUR, FOUR], ("5 CPUs on one node",)),
        ({"api_server_count": 3}, [FOUR, FOUR], ("3 frontends need as many nodes, and there are 2",)),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(
    settings: dict[str, object], nodes: list[dict[str, float]], parts: tuple[str, ...]
) -> None:
    text = missing(RayConfig.model_validate(settings), nodes)
    assert "\n" not in text
    assert all(part in text for part in parts), text
