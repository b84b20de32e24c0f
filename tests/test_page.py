"""The page at / in a real browser, and the live view that it shows."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
from importlib import resources

import httpx2 as httpx
import pytest
from browser import CHROMIUM, Browser
from fake_engine import ScriptedEngine, forever, limits, says
from jaxinfer_service.access import Access, make_key
from jaxinfer_service.live import MAX_WATCHERS
from serving import in_loop, serving, until

LONG = limits(max_model_len=1 << 15, kv_tokens=1 << 15)
PAGE = resources.files("jaxinfer_service.http").joinpath("page.html").read_text("utf-8")
browsing = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")


@contextlib.asynccontextmanager
async def served(engine, **config):
    """(address, httpx client) of a server over a scripted engine."""
    async with serving(engine, http_port=0, **config) as (server, _):
        url = f"http://127.0.0.1:{server.http_port}"
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            yield url, client


async def updates(client, count, **params):
    """The first messages of the live view."""
    found = []
    async with client.stream("GET", "/live", params=params) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        async for line in response.aiter_lines():
            if line:
                found.append(json.loads(line.removeprefix("data: ")))
            if len(found) == count:
                return found
    return found


# -- the live view -----------------------------------------------------------------------------


@in_loop
async def test_the_live_view_shows_slots_steps_and_pages():
    engine = ScriptedEngine(forever, LONG, step_seconds=0.001)  # two slots
    engine.cached = lambda request: 2
    async with served(engine) as (_, client):
        body = {"model": "fake", "prompt": "abcde", "max_tokens": 20_000}
        calls = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(3)]
        await until(lambda: len(engine.running) == 2 and engine.waiting)
        first, second = await updates(client, 2, interval=0.1, cells=4)
        rows = second["rows"]
        assert [(r["slot"], r["request_id"]) for r in rows] == [("0", "r1"), ("1", "r2")]
        for row, earlier in zip(rows, first["rows"], strict=True):
            assert (row["prompt_tokens"], row["cached_tokens"]) == ("5", "2")
            assert row["most_tokens"] == "20005"
            assert int(row["output_tokens"]) > int(earlier["output_tokens"])
        assert second["load"]["running"] == "2" and second["load"]["waiting"] == "1"
        assert int(second["steps"][0]["step"]) == int(first["steps"][-1]["step"]) + 1
        (pages,) = second["page_maps"]
        assert pages["pages"] == "8" and len(base64.b64decode(pages["cells"])) == 4
        for call in calls:
            call.cancel()


@in_loop
async def test_watchers_are_bounded_and_bad_questions_refused():
    async with served(ScriptedEngine()) as (_, client):
        for params, said in (
            ({"interval": 0.01}, "at least 0.1"),
            ({"cells": 5000}, "from 0 to 4096"),
            ({"cells": "many"}, "integer"),
        ):
            answer = await client.get("/live", params=params)
            assert answer.status_code == 400 and said in answer.json()["error"]["message"]
        async with contextlib.AsyncExitStack() as watchers:
            for _ in range(MAX_WATCHERS):
                await watchers.enter_async_context(client.stream("GET", "/live"))
            answer = await client.get("/live")
            assert answer.status_code == 429 and "Retry-After" in answer.headers
        for _ in range(600):  # they have left, which the server learns in time
            if await can_watch(client):
                return
            await asyncio.sleep(0.05)
        raise AssertionError("places of watchers that left are not given back")


async def can_watch(client):
    async with client.stream("GET", "/live") as response:
        return response.status_code == 200


@in_loop
async def test_a_server_that_stops_ends_the_live_view():
    async with serving(ScriptedEngine(), http_port=0) as (server, _):
        url = f"http://127.0.0.1:{server.http_port}/live"
        async with (
            httpx.AsyncClient(timeout=60) as client,
            client.stream("GET", url, params={"interval": 60}) as response,
        ):
            lines = response.aiter_lines()
            assert "load" in await anext(lines)
            server.shut_down()
            rest = "".join([line async for line in lines])
        assert "the server has stopped" in rest


@in_loop
async def test_the_live_view_is_for_operators_and_the_page_for_everyone(tmp_path):
    (user, user_hash), (boss, boss_hash) = make_key(), make_key()
    keys = tmp_path / "keys.yaml"
    keys.write_text(
        f"keys: [{{name: u, sha256: {user_hash}, roles: [inference]}},"
        f" {{name: b, sha256: {boss_hash}, roles: [admin]}}]"
    )
    async with served(ScriptedEngine(), access=Access(keys)) as (_, client):
        assert (await client.get("/")).status_code == 200
        assert (await client.get("/live")).status_code == 401
        asked = await client.get("/live", headers={"authorization": f"Bearer {user}"})
        assert asked.status_code == 403
        client.headers["authorization"] = f"Bearer {boss}"
        assert await can_watch(client)


# -- the page ----------------------------------------------------------------------------------


@in_loop
async def test_the_page_needs_nothing_but_its_server():
    async with served(ScriptedEngine()) as (_, client):
        answer = await client.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8" and answer.text == PAGE
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert not re.search(r"https?://|//[a-z]+\.|@import|src=|url\(", PAGE)


async def in_browser(work, *args):
    """Run what blocks beside the server's loop."""

    def run():
        with Browser() as browser:
            work(browser, *args)
            assert not browser.errors

    await asyncio.to_thread(run)


@browsing
@in_loop
async def test_a_chat_streams_and_stops_and_the_engine_is_seen_at_work():
    engine = ScriptedEngine(forever, LONG, step_seconds=0.01)

    def work(browser, url):
        browser.open(url)
        browser.until("document.activeElement.id === 'prompt'")
        said = "fake, 32768 tokens, weights float32, KV float32"
        browser.until(f"document.getElementById('model').textContent === '{said}'")
        cells = "document.querySelector('canvas')?.dataset.cells"
        idle = browser.until(cells)
        browser.type("<b>hello</b>")
        browser.press("Enter", shift=True)
        browser.type("there")
        browser.press("Enter")
        answer = "document.querySelector('.turn:not(.user) > span')?.textContent.length"
        browser.until(f"{answer} > 3")
        browser.until(f"{answer} > 20")  # it goes on
        assert browser.value("document.querySelector('.user').textContent") == "<b>hello</b>\nthere"
        assert browser.value("document.getElementById('prompt').value") == ""
        browser.until("document.querySelectorAll('.row').length === 1")
        busy = browser.until(f"{cells} !== {idle!r} && {cells}")
        assert "1" in busy and "1" not in idle
        browser.until("document.getElementById('figures').textContent.match(/[1-9]\\d* decode/)")
        browser.press("Escape")
        browser.until("!document.getElementById('send').disabled")
        assert "stopped" in browser.value("document.querySelector('.turn .note').textContent")
        browser.until("document.querySelectorAll('.row').length === 0")

    async with served(engine) as (url, _):
        await in_browser(work, url)
        await until(lambda: not engine.has_work)
        assert engine.counters.aborted == 1


@browsing
@in_loop
async def test_what_is_set_is_asked_and_the_chat_goes_on():
    asked = []

    def script(request):
        asked.append(request)
        return says("你好 😀")(request)

    def ask(browser, text):
        browser.type(text)
        browser.press("Enter")
        browser.until("document.getElementById('send').disabled === false")

    def work(browser, url):
        browser.open(url)
        browser.value("document.querySelector('details').open = true")
        for name, value in {"temperature": 0.5, "top_k": 7, "seed": 11, "max_tokens": 30}.items():
            browser.value(f"document.querySelector('[name={name}]').value = {value}")
        browser.value("document.querySelector('[name=system]').value = 'be brief'")
        ask(browser, "one")
        browser.until("document.querySelectorAll('.turn').length === 2")
        shown = browser.text()
        assert "你好 😀" in shown and "stop · 37 prompt tokens (0 cached), 12 of output" in shown
        ask(browser, "two")
        browser.until("document.querySelectorAll('.turn').length === 4")
        browser.value("document.querySelector('[name=max_tokens]').value = 100000")
        ask(browser, "three")
        browser.until("document.querySelector('.bad:not([hidden])')")
        assert "max_tokens" in browser.text() or "max_new_tokens" in browser.text()
        browser.errors.clear()  # the refused call is one for the browser's log

    async with served(ScriptedEngine(script, LONG)) as (url, _):
        await in_browser(work, url)
    params = asked[0].params
    assert (params.temperature, params.top_k, params.seed) == (0.5, 7, 11)
    assert asked[0].max_new_tokens == 30
    first, second = (bytes(request.prompt).decode() for request in asked)
    assert "be brief" in first and "one" in first
    assert "one" in second and "你好 😀" in second and second.endswith("two\nassistant:")


@browsing
@in_loop
async def test_settings_that_people_use_are_taken_and_wrong_ones_say_why():
    asked = []

    def script(request):
        asked.append(request.params)
        return says("yes")(request)

    usual = {"temperature": 0.75, "top_p": 0.92, "min_p": 0.005, "repetition_penalty": 1.1}
    usual |= {"presence_penalty": 0.25, "frequency_penalty": -0.05}

    def work(browser, url):
        browser.open(url)
        field = "document.querySelector('[name={}]')"
        for name, value in usual.items():
            browser.value(f"{field.format(name)}.value = {value}")
        browser.type("one")
        browser.press("Enter")
        browser.until("document.querySelector('.turn .note')")
        browser.value(f"{field.format('top_p')}.value = 2")
        assert not browser.value("document.querySelector('details').open")
        browser.type("two")
        browser.press("Enter")
        browser.until("document.activeElement.name === 'top_p'")  # with the browser's own words
        assert browser.value("document.querySelector('details').open")
        assert browser.value("document.getElementById('prompt').value") == "two"

    async with served(ScriptedEngine(script, LONG)) as (url, _):
        await in_browser(work, url)
    (params,) = asked
    assert {name: getattr(params, name) for name in usual} == usual


@browsing
@in_loop
async def test_a_new_chat_has_nothing_of_the_one_that_it_ends():
    asked = []

    def script(request):
        asked.append(bytes(request.prompt).decode())
        return forever(request) if len(asked) == 1 else says("fresh")(request)

    def work(browser, url):
        browser.open(url)
        browser.type("old")
        browser.press("Enter")
        browser.until("document.querySelector('.turn:not(.user) > span')?.textContent.length > 3")
        browser.value("document.getElementById('clear').click()")
        browser.until("!document.getElementById('send').disabled")
        assert browser.value("document.querySelectorAll('.turn').length") == 0
        browser.type("new")
        browser.press("Enter")
        browser.until("document.querySelector('.turn .note')")
        assert browser.value("document.querySelectorAll('.turn').length") == 2

    engine = ScriptedEngine(script, LONG, step_seconds=0.01)
    async with served(engine) as (url, _):
        await in_browser(work, url)
    assert asked[1] == asked[0].replace("old", "new")


@browsing
@in_loop
async def test_a_phone_shows_one_view_at_a_time():
    def work(browser, url):
        browser.size(390, 800)
        browser.open(url)
        visible = "getComputedStyle(document.getElementById('{}')).display !== 'none'"
        browser.until(visible.format("chat"))
        assert not browser.value(visible.format("engine"))
        assert browser.value("document.documentElement.scrollWidth") <= 390
        browser.value("document.getElementById('see-engine').focus()")
        browser.press("Enter")
        browser.until(visible.format("engine"))
        assert not browser.value(visible.format("chat"))
        browser.until("document.querySelector('canvas')")
        assert browser.value("document.documentElement.scrollWidth") <= 390

    async with served(ScriptedEngine()) as (url, _):
        await in_browser(work, url)
