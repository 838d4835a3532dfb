"""Install a package of one module without a network: copy the module and write its metadata, as an installer does."""

import shutil
import tomllib
from pathlib import Path

STEADY_DECODE = Path(__file__).parent / "steady_decode"


def install(source: Path, site: Path) -> None:
    """Install the package in directory `source` into `site`, a directory of the import path."""
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    for module in source.glob("*.py"):
        shutil.copy(module, site)
    register(site, project["name"], project["entry-points"])


def register(site: Path, name: str, groups: dict[str, dict[str, str]]) -> None:
    """Write the metadata of an installed package with these entry points."""
    metadata = site / f"{name.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{point} = {value}" for point, value in points.items())]
    (metadata / "entry_points.txt").write_text("\n".join(lines) + "\n")
