"""Settings of `runahead replay`."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from services.config.base import BaseConfig, from_json
from services.config.sizes import Size
from services.config.speculation import SpeculativeConfig


def _speculation(value: object) -> object:
    return value if value == "none" else from_json(value)


class WhatIfConfig(BaseConfig):
    """Settings that a what-if changes, under their names in `SchedulerConfig`; None: as recorded."""

    batch_queue_depth: int | None = Field(None, ge=1, le=64, description="What if: steps in flight.")
    batching_policy: str | None = Field(None, min_length=1, description="What if: batching policy.")
    scheduling_policy: Literal["fcfs", "priority"] | None = Field(
        None, description="What if: order of waiting requests."
    )
    max_num_seqs: int | None = Field(None, ge=1, le=65536, description="What if: maximum number of running requests.")
    max_num_batched_tokens: Size | None = Field(
        None, ge=1, description="What if: maximum number of tokens in one step."
    )
    num_blocks: int | None = Field(None, ge=2, description="What if: number of KV-cache blocks.")
    enable_prefix_caching: bool | None = Field(None, description="What if: share blocks of equal prefixes.")
    speculative_config: Annotated[SpeculativeConfig | Literal["none"] | None, BeforeValidator(_speculation)] = Field(
        None, description="What if: speculative decoding, as JSON, or none."
    )


class ReplayConfig(WhatIfConfig):
    recording: str = Field("", description="Directory of --record, or file of --record-placement.")
    incarnation: int | None = Field(
        None,
        ge=0,
        description="Recording of this scheduler, the first number in the names of its files. Default: the latest.",
    )
    draft_acceptance: float | None = Field(
        None,
        ge=0,
        le=1,
        description="What if: chance of a draft to be accepted. Default: as recorded; needed if the recording has no "
        "drafts.",
    )
    chart: str = Field(
        "", description="What if: file for a picture of the figures (.png, .svg); needs matplotlib. Default: none."
    )

    @property
    def is_what_if(self) -> bool:
        return bool(self.changes) or self.draft_acceptance is not None

    @property
    def changes(self) -> dict[str, object]:
        """Changed settings, under the names of `SchedulerConfig`."""
        given = self.model_dump(include=set(WhatIfConfig.model_fields), exclude_none=True)
        if "num_blocks" in given:
            given["num_gpu_blocks_override"] = given.pop("num_blocks")
        if given.get("speculative_config") == "none":
            given["speculative_config"] = None
        if "batch_queue_depth" in given:
            given["async_scheduling"] = None
        return given
