"""Settings of the load generator."""

from collections.abc import Iterator

from pydantic import Field

from services.config.base import TrustConfig


class BenchConfig(TrustConfig):
    """Settings of `runahead bench`. Names are those of `vllm bench serve` where the meaning is the same."""

    base_url: str = Field(
        "http://127.0.0.1:8000", pattern=r"^https?://[^/\s]", description="URL of the server, with or without /v1."
    )
    model: str = Field("", description="Model name in the requests. Default: the first one of the server.")
    api_key: str = Field("", description="Bearer token of the requests. Default: none.")
    num_prompts: int = Field(64, ge=1, description="Number of requests.")
    max_concurrency: int | None = Field(
        None, ge=1, description="Maximum number of requests open at once (closed loop). Default: no limit."
    )
    request_rate: float | None = Field(
        None, gt=0, description="Requests per second, with Poisson arrivals (open loop). Default: all requests at once."
    )
    random_input_len: int = Field(128, ge=1, description="Length of each prompt, tokens.")
    random_output_len: int = Field(128, ge=1, description="Length of each output, tokens.")
    random_id_low: int = Field(300, ge=0, description="Lowest token id in prompts.")
    random_id_high: int = Field(1000, ge=1, description="Upper bound of the token ids in prompts, exclusive.")
    temperature: float = Field(0.0, ge=0, description="Sampling temperature.")
    seed: int = Field(0, ge=0, description="Seed of prompts and arrival times.")
    ignore_eos: bool = Field(
        False, description="Continue after the end-of-sequence token, so that all outputs have the same length."
    )
    num_warmups: int = Field(0, ge=0, description="Number of requests before the measurement.")
    timeout: float = Field(600.0, gt=0, description="Maximum duration of a request, seconds.")
    save_result: bool = Field(False, description="Write the results as JSON.")
    result_filename: str = Field(
        "", description="File for the results; implies --save-result. Default: bench-TIME.json."
    )

    draw: bool = Field(
        False, description="Draw output tokens per second and open requests over time, below the results."
    )

    def refusals(self) -> Iterator[str]:
        yield from super().refusals()
        if self.random_id_high <= self.random_id_low:
            yield f"--random-id-high {self.random_id_high} must be above --random-id-low {self.random_id_low}"
