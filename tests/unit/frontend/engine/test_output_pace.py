"""Seconds between two tokens of a stream, from totals."""

from services.frontend.engine.output_pace import OutputPace


def report(pace: OutputPace, now: float, outputs: float, prompts: float = 8.0, running: float = 4.0) -> float:
    stats = {"num_requests_running": running, "generation_tokens": outputs, "prompt_tokens": prompts}
    pace.on_stats(stats, now)
    return pace.seconds


def test_a_stall_counts_with_its_length_unless_prompts_are_computed() -> None:
    pace = OutputPace()
    assert report(pace, 1.0, 0.0) == 0.0
    assert report(pace, 1.5, 100.0) == 0.0
    assert report(pace, 3.0, 400.0) == 4 * 2.0 / 400
    assert report(pace, 5.0, 400.0, prompts=9.0) == 4 * 2.0 / 400
    assert report(pace, 8.0, 400.0, prompts=9.0) == 3.0
    assert report(pace, 9.0, 400.0, prompts=9.0) == 4.0
    assert report(pace, 10.0, 800.0, prompts=9.0) == 4 * 5.0 / 400
    assert report(pace, 11.0, 800.0, running=0.0) == 0.0
    assert report(pace, 12.0, 5.0) == 0.0, "another scheduler counts from 0"
