"""Routes of --enable-admin-routes."""

import httpx

from tests.e2e.server import ServeProcess


def test_reset_prefix_cache_empties_the_cache(sim: ServeProcess) -> None:
    prompt = list(range(300, 364))

    def cached() -> int:
        with sim.client() as client:
            answer = client.completions.create(model=client.models.list().data[0].id, prompt=prompt, max_tokens=2)
        details = answer.usage.prompt_tokens_details
        return (details.cached_tokens or 0) if details is not None else 0

    def reset(query: str = "") -> httpx.Response:
        return httpx.post(f"{sim.url}/reset_prefix_cache{query}")

    cached()
    assert cached() == 48  # the last block has the token that is always computed
    assert reset().json() == {"success": True}
    assert cached() == 0
    assert reset("?reset_running_requests=true").json() == {"success": True}
    assert cached() == 0
    assert reset("?reset_running_requests=perhaps").status_code == 400


def test_admin_routes_are_not_served_without_the_flag(server: ServeProcess) -> None:
    assert httpx.post(f"{server.url}/reset_prefix_cache").status_code == 404
