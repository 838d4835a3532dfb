"""One frozen configuration per service: every setting with its unit, limits and default.

A setting has the same name as a flag (`--max-num-seqs`), in the environment (`RUNAHEAD_MAX_NUM_SEQS`) and in the YAML
file (`max-num-seqs`). The text below it is the help of the flag.
"""

from services.config import commands
from services.config.base import BaseConfig, ClientConfig, ServiceConfig, flag
from services.config.commands import (
    WITHOUT_SERVER,
    BenchConfig,
    ConvertConfig,
    ReplayConfig,
    RunBatchConfig,
    WhatIfConfig,
)
from services.config.frontend import FrontendConfig
from services.config.http import HttpConfig
from services.config.kv_events import KVEventsConfig
from services.config.ray import OF_RAY, WHY_NOT_OF_RAY, RayCommandConfig, RayConfig
from services.config.scheduler import SchedulerConfig
from services.config.serve import ENDPOINTS, OF_ONE_ENGINE, OMITTED, SERVICES, ServeConfig
from services.config.simulator import SimulatorConfig
from services.config.speculation import SpeculativeConfig
from services.config.worker import BackendConfig, WorkerConfig

_MODELS: list[type[BaseConfig]] = [
    RayCommandConfig,
    *(model for model in vars(commands).values() if isinstance(model, type) and issubclass(model, BaseConfig)),
]
EVERY_SETTING = frozenset(
    name for model in _MODELS for name, info in model.model_fields.items() if not info.is_required()
)
"""Names of the settings of all commands, without those that only the command line gives."""
