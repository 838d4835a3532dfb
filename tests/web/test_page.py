"""The page in a real browser, on real servers. Some tests write the pictures of the documentation."""

import json
import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect

from tests.web.conftest import FLAGS, KEY, NATIVE, PATIENCE_MS, Opener, WebServer, picture, serving

expect.set_options(timeout=PATIENCE_MS)
ASK = "List three planets of the solar system, one short line each, with the names in bold."


def ask(page: Page, text: str, **options: str | int) -> Locator:
    """Send a message with options of the form. Return the place of the (first) answer."""
    if options and page.locator("#options").is_hidden():
        page.click("#options-toggle")
    for name, value in options.items():
        page.fill(f"#{name}", str(value))
    if options:
        page.click("#options-toggle")
    count = page.locator(".turn:not(.user)").count()
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    return page.locator(".turn:not(.user)").nth(count)


def without_end(page: Page) -> None:
    """Let no answer end before its maximum, whatever the model says."""

    def add(route: Route) -> None:
        route.continue_(post_data=json.dumps({**route.request.post_data_json, "ignore_eos": True}))

    page.route("**/v1/chat/completions", add)


def wait_for_steps(page: Page) -> None:
    expect(page.locator("#timeline")).to_have_attribute("aria-label", re.compile("[0-9]+ steps on"))


def select_step(page: Page, *texts: str) -> None:
    """Go back from the last step to one whose facts contain the texts."""
    page.locator("#timeline").focus()
    page.keyboard.press("End")
    facts = page.locator("#detail p")
    for _ in range(80):
        page.keyboard.press("ArrowLeft")
        if all(text in facts.inner_text() for text in texts):
            return
    raise AssertionError(f"no step with {texts}: {facts.inner_text()}")


def click_a_step(page: Page, y: float) -> int:
    """Click into the canvas, on a step of the row at `y` pixels. Return its number."""
    canvas, title = page.locator("#timeline"), page.locator("#detail-title")
    box = canvas.bounding_box()
    for share in (0.80, 0.75, 0.70, 0.65, 0.60, 0.55, 0.50):  # a rank may wait where one clicks
        canvas.click(position={"x": share * box["width"], "y": y})
        if (match := re.fullmatch(r"Step (\d+) of epoch 1", title.inner_text())) is not None:
            return int(match[1])
    raise AssertionError(f"no step is under the row at {y}")


def rows_of(table: Locator) -> list[list[str]]:
    return [row.locator("td").all_inner_texts() for row in table.locator("tbody tr").all()]


def wait_for_frame(page: Page) -> None:
    """Wait until the canvas shows what was changed before."""
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def colour_share(page: Page, x: float, y: float) -> list[int]:
    """Return red, green and blue of the canvas at a share of its width and height."""
    return page.evaluate(
        """([x, y]) => { const c = document.getElementById("timeline"), p = c.getContext("2d");
        return [...p.getImageData(c.width * x, c.height * y, 1, 1).data].slice(0, 3); }""",
        [x, y],
    )


def test_a_stream_appears_and_its_steps_are_seen(model: WebServer, open_page: Opener) -> None:
    page = open_page(model)
    answer = ask(page, ASK, max_tokens=160, temperature=0, parallel=1)
    expect(answer.locator(".markdown")).not_to_be_empty()
    expect(page.locator("#send")).to_be_visible()
    expect(answer.locator(".note")).to_contain_text("tokens/s, first after")
    wait_for_steps(page)
    assert page.locator("#server").inner_text().endswith("on 1 rank, native backend, batch queue depth 2")
    select_step(page, "0 prefill tokens and 1 decode token")
    expect(page.locator("#detail table").nth(2)).to_contain_text("decode")
    wait_for_frame(page)
    picture(page, "page")


def test_an_answer_is_stopped(model: WebServer, open_page: Opener) -> None:
    page = open_page(model)
    answer = ask(page, "Tell me a very long story.", max_tokens=1500, temperature=0)
    expect(answer.locator(".markdown")).not_to_be_empty()
    expect(page.locator("#live")).to_contain_text("live")
    page.click("#stop")
    expect(answer.locator(".note")).to_have_text("stopped")
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator("#live")).to_contain_text("idle")


def test_markup_from_a_model_is_harmless(model: WebServer, open_page: Opener) -> None:
    """A schema with one value makes the model write it."""
    attack = (
        "<img src=x onerror=window.harm=1><script>window.harm=1</script><style>body{display:none}</style>"
        "<a href=javascript:window.harm=1>one</a> [two](javascript:window.harm=1) ![three](http://example.com/x.png) "
        "<form action=http://example.com><input></form><svg onload=window.harm=1></svg> **bold**"
    )
    page = open_page(model)
    answer = ask(page, "Go.", schema=json.dumps({"const": attack}), max_tokens=600, temperature=0)
    expect(answer.locator(".note")).to_contain_text("first after")
    expect(answer.locator(".markdown strong")).to_have_text("bold")
    assert page.evaluate("window.harm") is None
    for tag in ("img", "script", "style", "form", "input", "svg", "a[href^=javascript]"):
        assert answer.locator(f".markdown {tag}").count() == 0, tag


def test_a_tool_call_is_shown_with_its_arguments(model: WebServer, open_page: Opener) -> None:
    parameters = {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    page = open_page(model)
    page.click("#options-toggle")
    page.select_option("#tool_choice", "required")
    answer = ask(page, "The weather in Paris?", tools=json.dumps(tools), max_tokens=200, temperature=0)
    expect(answer.locator(".call h4").first).to_have_text("calls weather")
    expect(answer.locator(".call code").first).to_contain_text('"city": "Paris"')


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("temperature", "9", "Temperature: at most 2"),
        ("seed", "1.5", "Seed: a whole number"),
        ("schema", "{", "Structured output: this is not valid JSON"),
    ],
)
def test_an_option_that_is_not_valid_is_named_at_its_field(
    name: str, value: str, text: str, eight: WebServer, open_page: Opener
) -> None:
    page = open_page(eight)
    ask(page, "Hello", **{name: value})
    expect(page.locator("#options").get_by_role("alert")).to_contain_text(text)
    expect(page.locator(f"#{name}")).to_be_focused()
    expect(page.locator("#prompt")).to_have_value("Hello")
    page.fill(f"#{name}", "")
    expect(page.get_by_role("alert")).to_have_count(0)


def test_numbers_between_the_steps_of_a_field_are_sent(eight: WebServer, open_page: Opener) -> None:
    page = open_page(eight)
    with page.expect_request("**/v1/chat/completions") as sent:
        answer = ask(page, "Hello", temperature="0.75", top_p="0.925", max_tokens=4)
    expect(answer.locator(".note")).to_contain_text("first after")
    assert {"temperature": 0.75, "top_p": 0.925, "max_tokens": 4}.items() <= sent.value.post_data_json.items()


def test_a_chat_survives_a_reload_and_is_edited_and_answered_again(eight: WebServer, open_page: Opener) -> None:
    page = open_page(eight)
    expect(page.locator("#prompt")).to_be_focused()
    answer = ask(page, "Hello", max_tokens=12, temperature=0)
    expect(answer.locator(".note")).to_contain_text("first after")
    text = answer.locator(".markdown").inner_text()
    page.reload()
    expect(answer.locator(".markdown")).to_have_text(text)
    expect(page.locator("#prompt")).to_be_focused()
    answer.get_by_role("button", name="Regenerate").click()
    expect(answer.locator(".note")).to_contain_text("first after")
    expect(page.locator(".turn")).to_have_count(2)
    page.get_by_role("button", name="Edit").click()
    expect(page.locator("#prompt")).to_have_value("Hello")
    expect(page.locator(".turn")).to_have_count(0)
    assert page.evaluate("sessionStorage.length") == 0
    answer = ask(page, "Again", max_tokens=4)
    expect(answer.locator(".note")).to_contain_text("first after")
    page.click("#clear")
    page.reload()
    expect(page.locator(".empty")).to_be_visible()


def test_a_browser_that_stores_nothing_shows_the_engine(eight: WebServer, browser: Browser, tmp_path: Path) -> None:
    blocked = {"profile": {"default_content_setting_values": {"cookies": 2}}}
    (tmp_path / "Default").mkdir()
    (tmp_path / "Default" / "Preferences").write_text(json.dumps(blocked))
    launch = browser.browser_type.launch_persistent_context
    with launch(tmp_path, executable_path="/usr/bin/chromium", headless=False, args=list(FLAGS)) as context:
        page = context.new_page()
        page.goto(eight.url)
        expect(page.locator("#live")).not_to_have_text("waiting")


def test_an_answer_and_its_code_are_copied(eight: WebServer, open_page: Opener) -> None:
    """No simulated model writes code: the conversation is that of an earlier visit of the tab."""
    code = "print(" + "1 + " * 60 + "1)\n"
    content = f"Run this:\n```\n{code}```"
    chat = [{"role": "user", "content": "Code?"}, {"role": "assistant", "content": content}]
    page = open_page(eight)
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.evaluate("chat => sessionStorage.setItem('chat', JSON.stringify(chat))", chat)
    page.reload()
    for place, expected in ((".block", code), (".actions", content)):
        button = page.locator(f".turn.answer {place} .copy")
        button.click()
        expect(button).to_have_text("Copied")
        assert page.evaluate("navigator.clipboard.readText()") == expected
    bar = "(e => e.scrollWidth > e.clientWidth && e.offsetHeight > e.clientHeight)"
    assert page.locator(".block pre").evaluate(bar), "a wide block has a scroll bar that takes room"


def test_the_timeline_is_used_with_the_keyboard_alone(model: WebServer, open_page: Opener) -> None:
    page = open_page(model)
    ask(page, "Hello", max_tokens=24, temperature=0)
    wait_for_steps(page)
    expect(page.locator("#live")).to_contain_text("idle")
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.id") == "timeline":
            break
    label = page.locator("#timeline")
    page.keyboard.press("End")
    expect(label).to_have_attribute("aria-label", re.compile(r"Step \d+ of epoch 1 is selected"))
    last = label.get_attribute("aria-label")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowRight")
    expect(label).not_to_have_attribute("aria-label", last or "")
    expect(page.locator("#detail-title")).to_contain_text("of epoch 1")
    expect(page.locator("#detail table").nth(2)).to_contain_text("decode")
    page.keyboard.press("+")
    page.keyboard.press("-")
    page.keyboard.press("Escape")
    expect(page.locator("#detail-title")).to_have_text("No step selected")
    pause = page.locator("#pause")
    paused = pause.get_attribute("aria-pressed") == "true"  # if a selected step was outside the view
    for expected in (not paused, paused):
        page.keyboard.press("Space")
        expect(pause).to_have_attribute("aria-pressed", str(expected).lower())


def test_a_narrow_dark_window(model: WebServer, open_page: Opener) -> None:
    page = open_page(model, 420, 860, "dark")
    ask(page, "What is the capital of France?", max_tokens=60, temperature=0)
    expect(page.locator("#engine")).to_be_hidden()
    page.click("#tab-engine")
    expect(page.locator("#chat")).to_be_hidden()
    wait_for_steps(page)
    expect(page.locator("#live")).to_contain_text("idle")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 28)"
    picture(page, "narrow-dark")


@pytest.mark.parametrize(
    ("width", "height", "scheme"), [(1360, 940, "light"), (420, 860, "dark")], ids=["wide", "narrow"]
)
@pytest.mark.parametrize(("server", "num_ranks"), [("model", 1), ("eight", 8)])
def test_a_click_on_a_step_tells_its_requests_tokens_and_times(
    server: str, num_ranks: int, width: int, height: int, scheme: str, open_page: Opener, request: pytest.FixtureRequest
) -> None:
    served: WebServer = request.getfixturevalue(server)
    page = open_page(served, width, height, scheme)
    answer = ask(page, "Hello", max_tokens=40, temperature=0, parallel=6)
    expect(answer.locator(".note")).to_contain_text("first after")
    if width < 900:
        page.click("#tab-engine")
    wait_for_steps(page)
    expect(page.locator("#live")).to_contain_text("idle")
    number = "rank," if num_ranks == 1 else "ranks,"
    assert f"on {num_ranks} {number}" in page.locator("#server").inner_text()
    row_height = 46 if num_ranks == 1 else 36
    for rank in sorted({0, num_ranks - 1}):
        clicked = click_a_step(page, 64 + row_height * (rank + 0.4))
        entries = page.request.get(f"{served.url}debug/steps?limit=512").json()["entries"]
        (step,) = (entry for entry in entries if entry["kind"] == "step" and entry["step_id"] == clicked)
        tables = page.locator("#detail table")
        expect(tables).to_have_count(3)
        times = rows_of(tables.nth(1))
        assert [row[0] for row in times] == [str(number) for number in range(num_ranks)]
        for cells, measured in zip(times, step["ranks"], strict=True):
            ended = 1000 * (measured["forward_ended"] - step["planned"])
            assert float(cells[3]) == pytest.approx(ended, abs=0.006)
        requests = rows_of(tables.nth(2))
        assert [row[0] for row in requests] == step["requests"]
        assert [int(row[3]) for row in requests] == step["scheduled"]
        assert f"{step['decode_tokens']} decode token" in page.locator("#detail p").inner_text()
    page.locator("#timeline").press("ArrowLeft")
    expect(page.locator("#detail-title")).to_have_text(f"Step {clicked - 1} of epoch 1")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate("(e => e.scrollWidth <= e.clientWidth)(document.getElementById('engine'))")
    wait_for_frame(page)
    if num_ranks == 8:
        picture(page, "eight-ranks" if width > 900 else "eight-ranks-narrow", "#engine")


def test_with_a_wrong_key_nothing_is_shown(ranks: WebServer, open_page: Opener) -> None:
    page = open_page(ranks)
    expect(page.locator("#lock")).to_be_visible()
    page.fill("#key", "sesame…")  # no header can have it
    page.click("#lock button")
    expect(page.locator("#key:invalid")).to_be_visible()
    page.fill("#key", "wrong")
    page.click("#lock button")
    expect(page.locator("#lock-reason")).to_have_text("This key is not valid.")
    expect(page.locator("#main")).to_be_hidden()
    expect(page.locator("#server")).to_have_text("locked")
    page.fill("#key", KEY)
    page.press("#key", "Enter")
    expect(page.locator("#main")).to_be_visible()
    assert KEY not in page.content()
    assert page.evaluate("localStorage.length + sessionStorage.length") == 0
    assert page.context.cookies() == []
    page.reload()
    expect(page.locator("#lock")).to_be_visible()


def test_a_killed_rank_and_the_recovery_are_seen(ranks: WebServer, open_page: Opener) -> None:
    page = open_page(ranks)
    page.fill("#key", KEY)
    page.press("#key", "Enter")
    without_end(page)
    answer = ask(page, "Hello", max_tokens=200, parallel=2)
    expect(answer.locator(".note")).to_contain_text(re.compile(r"streaming, \d+ tokens in 2 answers, .* tokens/s"))
    answer.locator(".note").evaluate(
        """note => { window.notes = [];
        new MutationObserver(() => notes.push(note.textContent)).observe(note, { childList: true }); }"""
    )
    wait_for_steps(page)
    ranks.worker(2).kill()
    expect(page.locator("#events")).to_contain_text(re.compile("Epoch 1 ended: [0-2] steps in flight are void"))
    started = page.locator("#events button.started")
    expect(started.first).to_contain_text("Epoch 2 started after")
    expect(answer.locator(".note")).to_contain_text("first after")
    notes = page.evaluate("notes")
    assert "recovering; the answer goes on" in notes
    assert notes[-2].startswith("streaming")
    started.first.click()
    expect(page.locator("#pause")).to_have_attribute("aria-pressed", "true")
    wait_for_frame(page)
    red, green, blue = colour_share(page, 0.55, 0.42)
    assert red > green
    assert red > blue
    assert "on 4 ranks" in page.locator("#server").inner_text()
    page.click("#clear")  # the simulator's words have no meaning
    picture(page, "recovery")


def test_engines_their_streams_and_moves_are_seen(open_page: Opener, eight: WebServer) -> None:
    flags = "--backend", "sim", "--sim-step-ms", "40", "--data-parallel-size", "2"
    with serving(*flags, "--enable-admin-routes") as server:
        page = open_page(server, 1360, 1100)
        expect(page.locator("#engine-list tbody tr")).to_have_count(2)
        expect(page.locator("#engine-list")).to_contain_text(
            re.compile("0\\s*both\\s*ready.*1\\s*both\\s*ready", re.DOTALL)
        )
        page.evaluate(
            """async () => {
                const model = (await (await fetch("v1/models")).json()).data[0].id;
                const body = { model, prompt: "Hello", max_tokens: 4000, stream: true, ignore_eos: true };
                const options = { method: "POST", headers: { "Content-Type": "application/json" } };
                for (let n = 0; n < 4; n++) fetch("v1/completions", { ...options, body: JSON.stringify(body) });
            }"""
        )
        expect(page.locator("#stream-list h4")).to_have_text("4 open streams")
        expect(page.locator("#stream-list tbody tr")).to_have_count(4)
        assert {row[1] for row in rows_of(page.locator("#stream-list"))} == {"0", "1"}
        assert page.request.post(f"{server.url}engines/0/drain").ok
        expect(page.locator("#move-list")).to_contain_text(re.compile("0 → 1\\s*draining"))
        expect(page.locator("#engine-list tbody tr").first).to_contain_text("draining")
        expect(page.locator("#stream-list tbody tr")).to_have_count(4)
        expect(page.locator("#stream-list tbody")).to_contain_text("0, 1")
        assert {row[1] for row in rows_of(page.locator("#stream-list"))} == {"1"}
        picture(page, "engines", "#engines")
    page = open_page(eight)  # without the routes for administrators
    with page.expect_response("**/engines") as answer:
        page.reload()
    assert answer.value.status == 404
    expect(page.locator("#engines")).to_be_hidden()


@pytest.mark.parametrize("depth", [1, 2])
def test_figure_of_run_ahead(open_page: Opener, depth: int) -> None:
    """Eight answers at once, at both depths of the batch queue: the figures of docs/run-ahead.md."""
    with serving(*NATIVE, "--batch-queue-depth", str(depth)) as server:
        page = open_page(server, 1240, 900)
        answer = ask(page, "Tell me a very long story.", max_tokens=120, temperature=0, parallel=8)
        expect(answer.locator(".note")).to_contain_text(re.compile("in 8 answers.* first after"))
        for index in range(8):
            expect(page.locator(".turn .markdown").nth(index)).not_to_be_empty()
        expect(page.locator("#live")).to_contain_text("idle")
        in_flight = "2 steps in flight" if depth == 2 else "1 step in flight"
        select_step(page, in_flight, "8 requests running, 0 waiting", "0 prefill tokens and 8 decode tokens")
        for _ in range(4):  # others like it stand beside it
            page.keyboard.press("ArrowLeft")
        page.keyboard.press("Escape")
        page.locator("#timeline").blur()
        wait_for_frame(page)
        picture(page, f"depth-{depth}", ".canvas")
