"""Check of the cluster's resources."""

import ray

from services.config import RayConfig
from services.ray.resources import missing


def check_resources(config: RayConfig) -> None:
    """Raises: RuntimeError, if the cluster's nodes have too few CPUs or GPUs, and no others are awaited"""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not config.wait_for_resources and (text := missing(config, nodes)):
        raise RuntimeError(
            f"{text}; add nodes, use fewer ranks or --threads, or set --wait-for-resources if nodes are added"
        )
