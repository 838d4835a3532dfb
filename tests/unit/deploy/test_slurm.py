"""The batch script for Slurm: each service has keys of its own, and flags that exist."""

import re
import subprocess
from pathlib import Path

from services.config import SERVICES

SCRIPT = Path(__file__).parents[3] / "deploy/slurm/runahead.sbatch"


def test_each_service_has_the_keys_of_its_role_and_flags_that_exist() -> None:
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    commands = re.findall(r'^step .*-- "\$RUNAHEAD" (\w+) (.*)$', SCRIPT.read_text().replace("\\\n", " "), re.M)
    assert [service for service, _ in commands] == ["scheduler", "worker", "frontend"]
    for service, flags in commands:
        assert f'--transport-keys "$directory/keys/{service}"' in flags
        names = {flag.replace("-", "_") for flag in re.findall(r"--([a-z-]+)", flags)}
        assert names <= {*SERVICES[service].model_fields}
    assert '--api-key-file "$directory/api-key"' in dict(commands)["frontend"]
