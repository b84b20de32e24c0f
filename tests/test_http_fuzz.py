"""The HTTP front under requests made from its own OpenAPI document, right and wrong ones.

Whatever comes, an answer is one that the document knows, the engine lives, and nothing it was asked
is left or lost.
"""

from __future__ import annotations

import httpx2 as httpx
import pytest
import schemathesis
from fake_engine import LONG, ScriptedEngine, balanced, echo
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS
from serving import PATIENCE_S, server_thread

schemathesis.checks.load_all_checks()
CONFORMS = CHECKS.get_by_names(
    ["status_code_conformance", "content_type_conformance", "response_schema_conformance"]
)
MAY_BE = (503, 504)  # of a server that is well: it is stopping, a deadline passed


@pytest.fixture(scope="module")
def engine():
    return ScriptedEngine(echo, LONG)


@pytest.fixture(scope="module")
def url(engine):
    with server_thread(engine, "http_port", http_port=0) as address:
        yield f"http://{address}"
    assert balanced(engine.counters, engine)
    assert engine.counters.received > 0 and not engine.running and not engine.waiting


@pytest.fixture(scope="module")
def document(url):
    found = httpx.get(f"{url}/openapi.json").json()
    del found["paths"]["/live"]  # which goes on for ever
    return schemathesis.openapi.from_dict(found)


PATHS = [
    ("/v1/completions", "POST"),
    ("/v1/chat/completions", "POST"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
    ("/v1/models", "GET"),
    ("/v1/models/{name}", "GET"),
    ("/health", "GET"),
    ("/ready", "GET"),
    ("/version", "GET"),
    ("/metrics", "GET"),
]


def test_no_path_of_the_document_is_left_out(document):
    assert sorted(document) == sorted(path for path, _ in PATHS)


RIGHT, WRONG = GenerationMode.POSITIVE, GenerationMode.NEGATIVE
ASKED = [(*path, RIGHT) for path in PATHS] + [(*p, WRONG) for p in PATHS if p[1] == "POST"]


@pytest.mark.parametrize(("path", "method", "mode"), ASKED)
def test_every_answer_is_one_that_the_document_knows(document, url, path, method, mode):
    operation = document[path][method]

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(generation_mode=mode))
    def ask(case):
        response = case.call(base_url=url, timeout=PATIENCE_S)
        case.validate_response(response, checks=CONFORMS)
        status = response.status_code
        assert status < 500 or status in MAY_BE, response.text
        if status >= 400 and method == "POST":
            assert response.json()["error"]["message"]

    ask()


def test_afterwards_it_answers_as_ever(url):
    asked = {"prompt": "x", "max_tokens": 3, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=PATIENCE_S)
    assert answer.json()["choices"][0]["text"] == "x"
