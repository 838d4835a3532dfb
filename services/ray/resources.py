"""Bundles of an engine's placement group, and what a cluster lacks for an application."""

from collections.abc import Mapping, Sequence

from services.config import RayConfig

Resources = Mapping[str, float]

SCHEDULER_CPUS = 1.0
FRONTEND_CPUS = 1.0


def bundles(config: RayConfig) -> list[dict[str, float]]:
    """Return the bundles of the ranks, one per tensor-parallel group, as a bundle is on one node, or one per rank, and
    then that of the scheduler. It is last: with SPREAD, Ray gives each bundle a node of its own as long as there are
    any, and ranks need them more."""
    ranks = ranks_per_bundle(config)
    group = {name: amount * ranks for name, amount in rank_resources(config).items()}
    return [*[group] * (config.num_workers // ranks), {"CPU": SCHEDULER_CPUS}]


def ranks_per_bundle(config: RayConfig) -> int:
    return 1 if config.placement_group_strategy == "SPREAD" else config.num_workers // config.pipeline_parallel_size


def engines_of_node(config: RayConfig, cpus: float) -> int:
    """Return the number of engines that may have ranks on a node with this number of CPUs."""
    return int(max(1, min(config.max_engines, cpus // (config.threads * ranks_per_bundle(config)))))


def rank_resources(config: RayConfig) -> dict[str, float]:
    gpus = {"GPU": 1.0} if config.device == "cuda" else {}
    return {"CPU": float(config.threads), **gpus}


def missing(config: RayConfig, nodes: Sequence[Resources]) -> str:
    """Return why the living nodes can never hold the engines and frontends, in one line, or "". `nodes`: resources of
    each node, whether they are in use or not."""
    engine = bundles(config)
    if config.placement_group_strategy == "STRICT_PACK":
        engine = [{name: sum(bundle.get(name, 0.0) for bundle in engine) for name in engine[0]}]
    needed = engine * config.data_parallel_size
    total = {name: sum(bundle.get(name, 0.0) for bundle in needed) for name in engine[0]}
    total["CPU"] += FRONTEND_CPUS * config.api_server_count
    largest = engine[0]
    places, count = sum(_holds(node, largest) for node in nodes), needed.count(largest)
    there = f"{_words(config)} need {_text(total)}; the nodes have {_nodes(nodes)}"
    if lacking := [name for name in total if sum(node.get(name, 0.0) for node in nodes) < total[name]]:
        return f"{there}, which are too few {' and '.join(f'{name}s' for name in lacking)}"
    if places < count:
        return f"{there}, where {_text(largest)} on one node are free {places} times, not {count} times"
    if len(nodes) < config.api_server_count:
        return f"{config.api_server_count} frontends need as many nodes, and there are {len(nodes)}"
    return ""


def _holds(node: Resources, bundle: Resources) -> int:
    """Return how many such bundles fit on an empty node."""
    return int(min(node.get(name, 0.0) // amount for name, amount in bundle.items()))


def _words(config: RayConfig) -> str:
    counts = {"engine": config.data_parallel_size, "frontend": config.api_server_count}
    engines, frontends = (f"{count} {name}{'s' * (count > 1)}" for name, count in counts.items())
    return f"{engines} of {config.num_workers} rank{'s' * (config.num_workers > 1)} and {frontends}"


def _nodes(nodes: Sequence[Resources]) -> str:
    return " + ".join(_text({name: node.get(name, 0.0) for name in ("CPU", "GPU") if name in node}) for node in nodes)


def _text(resources: Resources) -> str:
    return " and ".join(f"{amount:g} {name}{'s' * (amount != 1)}" for name, amount in resources.items())
