"""`runahead run-batch` with services of its own, which end with the batch."""

import json
import os
from pathlib import Path

from services.checkpoint import DEMO_MODEL
from tests.e2e.forked import CODE
from tests.preloaded import OUTPUT, PreloadedProcess


def test_batch_starts_and_stops_its_services(tmp_path: Path) -> None:
    source, target, runtime = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "run"
    runtime.mkdir()
    model = DEMO_MODEL.name
    bodies = [
        ("/v1/completions", {"model": model, "prompt": "Hello", "max_tokens": 3}),
        ("/v1/embeddings", {"model": model, "input": "Hello"}),
        ("/v1/completions", {"model": "another", "prompt": "Hello"}),
    ]
    source.write_text(
        "".join(
            json.dumps({"custom_id": str(i), "method": "POST", "url": url, "body": body}) + "\n"
            for i, (url, body) in enumerate(bodies)
        )
    )
    command = ("run-batch", str(DEMO_MODEL), "--backend", "sim", "-i", str(source), "-o", str(target))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RUNAHEAD_")}
    environment = clean | {"XDG_RUNTIME_DIR": str(runtime), "RUNAHEAD_API_KEY": "sesame"}
    with (tmp_path / "log").open("w+") as log:
        process = PreloadedProcess(CODE, *command, pipes=(OUTPUT,), log=log, environment=environment, is_parent=True)
        with process.stdout:
            printed = process.stdout.read().decode()
        log.seek(0)
        assert process.wait() == 1, log.read()
    assert "3 lines written" in printed
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    statuses = [answer["response"]["status_code"] for answer in answers]
    assert statuses[0] == 200
    assert statuses[2] == 404
    assert answers[0]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert list(runtime.iterdir()) == [], "sockets or files are left"
