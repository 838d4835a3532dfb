"""`runahead config show`: the merged configuration, as YAML that `--config` accepts."""

import json
import sys

from services.cli.settings import Settings
from services.config import ServeConfig


def show(settings: Settings[ServeConfig]) -> int:
    """Print `name: value  # origin` for each setting. Only the number of API keys is printed."""
    for name, origin in settings.origins.items():
        key, value = name.replace("_", "-"), getattr(settings.config, name)
        if name == "api_key" and value:
            sys.stdout.write(f"# {key}: {len(value)} not shown  # {origin}\n")
            continue
        sys.stdout.write(f"{key}: {json.dumps(value)}  # {origin}\n")
    return 0
