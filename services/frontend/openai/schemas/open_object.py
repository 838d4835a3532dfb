"""Base of the objects in request bodies."""

from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from services.frontend.openai.schemas.fields import JSON
from services.frontend.openai.schemas.unserved import Neutral


def _add_unserved(schema: JSON, kind: type["OpenObject"]) -> None:
    """Describe the known fields that are not served, with the values that change nothing."""
    for name, values in kind.unserved().items():
        allowed = (None, *values)
        distinct = [v for i, v in enumerate(allowed) if v not in allowed[:i]]  # 1 and 1.0 are equal in JSON
        schema["properties"].setdefault(name, {"enum": distinct, "description": "Not supported."})


class OpenObject(BaseModel):
    """Object of a body with more fields than are served: the rule for them is in `parameters.body`."""

    model_config = ConfigDict(extra="allow", strict=True, json_schema_extra=_add_unserved)

    not_served: ClassVar[Neutral] = {}
    """Known fields that are not served, of this kind of object alone."""

    @classmethod
    def unserved(cls) -> Neutral:
        """Return all known fields that are not served."""
        return cls.not_served
