"""Bundles of an engine's placement group, and what a cluster lacks for an application."""

from collections.abc import Mapping, Sequence

from services.config import RayConfig

Resources = Mapping[str, float]

SCHEDULER_CPUS = 1.0
FRONTEND_CPUS = 1.0


def bundles(config: RayConfig) -> list[dict[str, float]]:
    """Return the bundle of the scheduler and then those of the ranks: one per tensor-parallel group, as a bundle is on
    one node, or one per rank."""
    return [{"CPU": SCHEDULER_CPUS}, *([_group(config)] * (config.num_workers // ranks_per_bundle(config)))]


def ranks_per_bundle(config: RayConfig) -> int:
    return 1 if config.placement_group_strategy == "SPREAD" else _tensor_parallel(config)


def rank_resources(config: RayConfig) -> dict[str, float]:
    gpus = {"GPU": 1.0} if config.device == "cuda" else {}
    return {"CPU": float(config.threads), **gpus}


def _tensor_parallel(config: RayConfig) -> int:
    return config.num_workers // config.pipeline_parallel_size


def _group(config: RayConfig) -> dict[str, float]:
    return {name: amount * ranks_per_bundle(config) for name, amount in rank_resources(config).items()}


def missing(config: RayConfig, nodes: Sequence[Resources]) -> str:
    """Return what the living nodes lack in all for the engines and frontends, in one line, or "".

    Args:
        nodes: resources of each node, whether they are in use or not.
    """
    free = [dict(node) for node in nodes]
    engine = bundles(config)
    if config.placement_group_strategy == "STRICT_PACK":
        engine = [{name: sum(b.get(name, 0.0) for b in engine) for name in engine[-1]}]
    needed = sorted(engine * config.data_parallel_size, key=lambda bundle: -bundle["CPU"])
    for bundle in needed:
        node = next((node for node in free if _fits(bundle, node)), None)
        if node is None:
            return f"{_words(config, needed, nodes)}, and {_text(bundle)} on one node are missing"
        for name, amount in bundle.items():
            node[name] = node.get(name, 0.0) - amount
    if len(nodes) < config.api_server_count:
        return f"{config.api_server_count} frontends need as many nodes, and there are {len(nodes)}"
    if sum(node.get("CPU", 0.0) >= FRONTEND_CPUS for node in free) < config.api_server_count:
        return f"{_words(config, needed, nodes)}, and {FRONTEND_CPUS:g} CPU for a frontend is missing"
    return ""


def _fits(bundle: Resources, node: Resources) -> bool:
    return all(node.get(name, 0.0) >= amount for name, amount in bundle.items())


def _words(config: RayConfig, needed: Sequence[Resources], nodes: Sequence[Resources]) -> str:
    total = {name: sum(bundle.get(name, 0.0) for bundle in needed) for name in rank_resources(config)}
    total["CPU"] += FRONTEND_CPUS * config.api_server_count
    engines, frontends = config.data_parallel_size, config.api_server_count
    return (
        f"{engines} engine{'s' * (engines > 1)} of {config.num_workers} rank{'s' * (config.num_workers > 1)} and "
        f"{frontends} frontend{'s' * (frontends > 1)} need {_text(total)}; the nodes have {_nodes(nodes)}"
    )


def _nodes(nodes: Sequence[Resources]) -> str:
    return " + ".join(
        _text({name: node.get(name, 0.0) for name in ("CPU", "GPU") if name in node}) for node in nodes
    )


def _text(resources: Resources) -> str:
    return " and ".join(f"{amount:g} {name}{'s' * (amount != 1)}" for name, amount in resources.items())
