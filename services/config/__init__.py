"""One frozen configuration per service: every setting with its unit, limits and default.

A setting has the same name as a flag (`--max-num-seqs`), in the environment (`RUNAHEAD_MAX_NUM_SEQS`) and in the YAML
file (`max-num-seqs`). The text below it is the help of the flag.
"""

from services.config.base import BaseConfig, ClientConfig, ServiceConfig, flag
from services.config.commands import (
    WITHOUT_SERVER,
    BenchConfig,
    ConvertConfig,
    DrainConfig,
    KeeperConfig,
    ReplanConfig,
    ReplayConfig,
    RunBatchConfig,
    ServerConfig,
    ShowConfig,
    TraceConfig,
    WhatIfConfig,
)
from services.config.frontend import FrontendConfig
from services.config.http import HttpConfig
from services.config.kv_events import KVEventsConfig
from services.config.ray import OF_RAY, RayCommandConfig, RayConfig
from services.config.scheduler import SchedulerConfig
from services.config.serve import ENDPOINTS, OF_ONE_ENGINE, OMITTED, SERVICES, ServeConfig
from services.config.simulator import SimulatorConfig
from services.config.speculation import SpeculativeConfig
from services.config.worker import BackendConfig, WorkerConfig

_COMMANDS: tuple[type[BaseConfig], ...] = (
    *(RunBatchConfig, BenchConfig, ConvertConfig, ReplayConfig, RayCommandConfig),
    *(ShowConfig, DrainConfig, ReplanConfig, TraceConfig, KeeperConfig),
)
EVERY_SETTING = frozenset(name for model in (*_COMMANDS, *SERVICES.values()) for name in model.model_fields)
"""Names of the settings of all commands."""
