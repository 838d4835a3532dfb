"""The systemd unit: it permits what `serve` needs."""

import os
from pathlib import Path

UNIT = (Path(__file__).parents[3] / "deploy/systemd/runahead.service").read_text().splitlines()


SETTINGS = dict(line.split("=", 1) for line in UNIT if "=" in line and not line.startswith("#"))


def test_the_service_has_no_rights_of_its_own_and_time_for_open_requests() -> None:
    assert {SETTINGS[name] for name in ("DynamicUser", "NoNewPrivileges", "PrivateTmp", "ProtectHome")} == {"yes"}
    assert (SETTINGS["CapabilityBoundingSet"], SETTINGS["ProtectSystem"]) == ("", "strict")
    assert (SETTINGS["KillMode"], SETTINGS["TimeoutStopSec"]) == ("mixed", "120")
    assert (SETTINGS["Restart"], SETTINGS["RestartPreventExitStatus"]) == ("on-failure", "2")


def test_the_unit_permits_models_of_the_hub_and_several_ranks() -> None:
    """Only the cache directory can be written. Gloo lists the addresses of the machine by netlink."""
    (environment,) = (line for line in UNIT if line.startswith("Environment="))
    variables = dict(item.split("=", 1) for item in environment.partition("=")[2].split())
    cache = f"%C/{SETTINGS['CacheDirectory']}"
    assert os.path.commonpath([cache, variables["HF_HOME"]]) == cache
    assert "AF_NETLINK" in SETTINGS["RestrictAddressFamilies"].split()
