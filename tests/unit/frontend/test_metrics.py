"""The histogram equals that of prometheus_client; statistics of the engine are exported."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from protocol.requests import EnginePhase, EngineState
from services.frontend.metrics import LatencyHistogram, Metrics

BUCKETS = (0.01, 0.5, 1, 2.5, 10)
LABELS = ("demo", "0")


def samples(registry: CollectorRegistry) -> dict[tuple[str, str | None], float]:
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, sample.labels.get("le")): sample.value
        for family in families
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@given(st.lists(st.one_of(st.sampled_from(BUCKETS), st.floats(0, 20))))
def test_histogram_equals_that_of_the_library(values: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    seconds = LatencyHistogram("runahead:x_seconds", "text", BUCKETS, LABELS)
    ours.register(seconds)
    histogram = Histogram(
        "runahead:x_seconds", "text", ("model_name", "engine"), buckets=BUCKETS, registry=theirs
    )
    for value in values:
        seconds.observe(value)
        histogram.labels(*LABELS).observe(value)
    histogram.labels(*LABELS)
    assert samples(ours) == samples(theirs)


def test_statistics_of_the_engine_are_labelled_by_position() -> None:
    engine = SimpleNamespace(
        state=EngineState(
            EnginePhase.READY, stats={"accepted:0": 5.0, "accepted:1": 3.0, "steps_total": 7.0, "epoch": 2.0}
        )
    )
    text = Metrics(engine, "demo").render().decode()  # type: ignore[arg-type]
    for line in (
        'runahead:accepted_total{engine="0",model_name="demo",position="0"} 5.0',
        'runahead:accepted_total{engine="0",model_name="demo",position="1"} 3.0',
        'runahead:steps_total{engine="0",model_name="demo"} 7.0',
        'runahead:epoch{engine="0",model_name="demo"} 2.0',
    ):
        assert line in text
