"""Runahead on a Ray cluster: `serve run services.ray:app model=...`.

Ray places, restarts and scales the services; requests and tokens pass between them as without Ray.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    """Import Ray only for the application: what has no need of it can be used without."""
    if name != "app":
        raise AttributeError(name)
    from services.ray.application import app

    return app
