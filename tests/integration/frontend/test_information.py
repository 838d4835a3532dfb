"""Routes that describe the server: models, sizes, load."""

from datetime import datetime

import httpx
import pytest

from services.checkpoint import DEMO_MODEL
from tests.integration.frontend.scripted import CONTEXT, TOKENIZER, Frontend, ScriptedScheduler, scripted, wait_until
from tests.integration.frontend.test_connections import connect, post


def get(frontend: Frontend, path: str) -> httpx.Response:
    return httpx.get(frontend.url + path)


def test_each_model_has_an_entry(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    with frontend.client() as client:
        for model in client.models.list():
            assert client.models.retrieve(model.id) == model
    missing = get(frontend, "/v1/models/gpt-9")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_models_have_the_names_and_times_of_anthropics_client(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    found = get(frontend, "/v1/models/").json()
    model = found["data"][0]
    assert (model["type"], model["display_name"]) == ("model", model["id"])
    assert datetime.fromisoformat(model["created_at"]).timestamp() == model["created"]
    assert (found["first_id"], found["last_id"]) == (model["id"], found["data"][-1]["id"])


def test_information_has_sizes_and_no_secrets() -> None:
    with scripted(served_model_name=["org/demo"], api_key=["sesame"]) as (frontend, _):

        def content(path: str) -> dict[str, object]:
            assert get(frontend, path).status_code == 401
            answer = httpx.get(frontend.url + path, headers={"authorization": "Bearer sesame"})
            assert "sesame" not in answer.text
            return answer.json()

        entry = content("/v1/models/org/demo")
        assert (entry["id"], entry["root"], entry["parent"]) == ("org/demo", DEMO_MODEL.name, None)
        assert content("/v1/models/org%2Fdemo")["id"] == "org/demo"
        info = content("/server_info")
        assert (info["phase"], info["max_model_len"], info["served_model_names"]) == ("ready", CONTEXT, ["org/demo"])
        for path in ("/server_info", "/get_server_info", "/model_info", "/get_model_info"):
            keys = "model_id", "model_path", "tokenizer_path", "served_model_name"
            assert {content(path)[key] for key in keys} == {"org/demo"}
        assert content("/model_info")["is_generation"] is True
        tokenizer = content("/tokenizer_info")
        assert tokenizer["special_tokens"] == TOKENIZER.special
        assert "messages" in str(tokenizer["chat_template"])


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD"])
def test_ping_is_a_probe(frontend: Frontend, scheduler: ScriptedScheduler, method: str) -> None:
    assert httpx.request(method, f"{frontend.url}/ping").status_code == 200


def test_load_is_the_number_of_open_requests(frontend: Frontend, scheduler: ScriptedScheduler) -> None:
    def load() -> int:
        return int(get(frontend, "/load").json()["server_load"])

    wait_until(lambda: load() == 0, "nothing is open")
    with connect(frontend) as connection:
        post(connection, {"prompt": "x", "n": 2})
        wait_until(lambda: load() == 2, "both choices are open")
    wait_until(lambda: load() == 0, "the requests are aborted")
