"""The application of Ray Serve: a deployment of engines and one of frontends."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve import Application

from services import release
from services.cli.preflight import check_placement, check_policy
from services.cli.settings import ConfigurationError, meant_key, merge
from services.config import OF_RAY, WHY_NOT_OF_RAY, RayConfig, flag
from services.ray.cluster import check_resources, show_reasons
from services.ray.engine import EngineReplica
from services.ray.frontend import FrontendReplica
from services.ray.resources import FRONTEND_CPUS, bundles

ATTEMPTS = 3
"""Starts of a replica that fail before the deployment does."""
METRICS_INTERVAL = 2.0
"""Seconds between two reports of an engine's load."""


def app(args: dict[str, Any]) -> Application:
    """Build the application from settings with the names of `runahead serve`, such as model=... for `serve run`.

    Raises: ConfigurationError; RuntimeError, if the cluster is too small
    """
    built = application(settings(args))
    if not ray.is_initialized():  # in the process of `serve run`
        threading.Thread(target=show_reasons, name="reasons", daemon=True).start()
    return built


def settings(args: Mapping[str, Any]) -> RayConfig:
    """Raises: ConfigurationError"""
    if refused := sorted(OF_RAY.intersection(args)):
        raise ConfigurationError(f"{flag(refused[0])}: {WHY_NOT_OF_RAY}")
    if unknown := sorted(args.keys() - RayConfig.model_fields.keys()):
        raise ConfigurationError(f"there is no setting {unknown[0]}{meant_key(unknown[0], RayConfig.model_fields)}")
    return merge(RayConfig, args, omitted=OF_RAY).config


def application(config: RayConfig) -> Application:
    """Raises: ConfigurationError; RuntimeError, if the cluster is too small"""
    check_policy(config)
    check_placement(config)
    if ray.is_initialized():
        check_resources(config)
    if config.model and Path(config.model).exists():  # services have other working directories
        config = config.model_copy(update={"model": str(Path(config.model).absolute())})
    arguments = config.model_dump(exclude_unset=True, mode="json"), release.version()
    engines = serve.deployment(EngineReplica).options(
        name="Engine",
        ray_actor_options={"num_cpus": 0},
        placement_group_bundles=bundles(config),
        placement_group_strategy=config.placement_group_strategy,
        graceful_shutdown_timeout_s=config.drain_timeout_seconds,
        max_constructor_retry_count=ATTEMPTS,
        **_count(config),
    )
    frontends = serve.deployment(serve.ingress()(FrontendReplica)).options(
        name="Frontend",
        num_replicas=config.api_server_count,
        max_replicas_per_node=1,
        ray_actor_options={"num_cpus": FRONTEND_CPUS},
        max_ongoing_requests=2 * config.max_open_requests,  # the frontend refuses early; Serve would queue
        graceful_shutdown_timeout_s=config.drain_timeout_seconds,
        max_constructor_retry_count=ATTEMPTS,
    )
    return frontends.bind(*arguments, engines.bind(*arguments))


def _count(config: RayConfig) -> dict[str, Any]:
    if config.max_engines == config.data_parallel_size:
        return {"num_replicas": config.data_parallel_size}
    return {
        "autoscaling_config": {
            "min_replicas": config.data_parallel_size,
            "initial_replicas": config.data_parallel_size,
            "max_replicas": config.max_engines,
            "metrics_interval_s": METRICS_INTERVAL,
            "look_back_period_s": 5 * METRICS_INTERVAL,
            "upscale_delay_s": config.upscale_delay_s,
            "downscale_delay_s": config.downscale_delay_s,
            "policy": {
                "policy_function": "services.ray.scaling:QueueSeconds",
                "policy_kwargs": {"target": config.target_queue_seconds},
            },
        }
    }
