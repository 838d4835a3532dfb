"""Runahead on a Ray cluster: `serve run services.ray:app model=...`.

Ray places, restarts and scales the services; requests and tokens pass between them as without Ray.
"""

from services.ray.application import app

__all__ = ["app"]
