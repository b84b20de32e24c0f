"""What is refused over HTTP is called what the caller called it, wherever it was found."""

from __future__ import annotations

import httpx2 as httpx
import pytest
from fake_engine import LONG, ScriptedEngine, echo, says
from jaxinfer_service import status
from jaxinfer_service.http.chat_schema import Message
from jaxinfer_service.http.not_computed import ChatNotComputed
from serving import PATIENCE_S, in_loop, serving

from jaxinfer.request import RequestError, Violation

CHAT = {"messages": [{"role": "user", "content": "x"}]}
TOOL = {"type": "function", "function": {"name": "f"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {}}}

CHATS = [
    ({"max_completion_tokens": 0}, "max_completion_tokens", "is 0; it must be at least 1"),
    ({"max_completion_tokens": 99}, "max_completion_tokens", "is 99; with "),
    ({"max_tokens": 0}, "max_tokens", "is 0; it must be at least 1"),
    ({"max_completion_tokens": 4, "min_tokens": 5}, "min_tokens", "come (max_completion_tokens)"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens", "come (max_tokens)"),
    ({"max_tokens": 4, "max_completion_tokens": 4}, "max_completion_tokens", "beside max_tokens"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "is 21"),
    ({"top_logprobs": 1}, "top_logprobs", "logprobs is not true"),
    ({"messages": [{"role": "user", "content": "x" * 99}]}, "messages", "max_model_len"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "is missing"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
    ({"response_format": SCHEMA | {"type": "text"}}, "response_format.json_schema", "belongs"),
    ({"response_format": SCHEMA | {"json_schema": {"name": 5, "schema": {}}}},
     "response_format.json_schema.name", "string"),
    ({"response_format": SCHEMA | {"json_schema": {"strict": "yes", "schema": {}}}},
     "response_format.json_schema.strict", "boolean"),
    ({"response_format": SCHEMA | {"json_schema": {"name": "n"}}},
     "response_format.json_schema.schema", "required"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "beside guided_regex"),
    ({"add_special_tokens": True}, "add_special_tokens", "by itself"),
    ({"modalities": ["text", "audio"]}, "modalities", "only ['text'] is taken"),
    ({"continue_final_message": True}, "continue_final_message", "/v1/completions"),
]  # fmt: skip

COMPLETIONS = [
    ({"prompt": ["a", ""]}, "prompt[1]", "is empty"),
    ({"prompt": [[1], [2, 257]]}, "prompt[1][1]", "from 0 to 256"),
    ({"prompt": [257]}, "prompt[0]", "from 0 to 256"),
    ({"prompt": "x", "echo": True, "logprobs": 21}, "logprobs", "is 21"),
    ({"prompt": "x", "echo": True, "prompt_logprobs": 21}, "prompt_logprobs", "is 21"),
    ({"prompt": "x", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream is true"),
    ({"prompt": "x", "return_tokens_as_token_ids": True}, "return_tokens_as_token_ids", "logprobs"),
]

OTHERS = [
    ("/tokenize", {}, "prompt", "is missing, and so is messages"),
    ("/tokenize", CHAT | {"prompt": "x"}, "prompt", "beside messages"),
    ("/tokenize", {"prompt": "x", "tools": [TOOL]}, "tools", "no messages"),
    ("/tokenize", {"messages": [{"role": "user", "content": "x" * 9999}]}, "messages", "64"),
    ("/detokenize", {"tokens": [1, -1]}, "tokens[1]", "from 0 to 256"),
    ("/live?interval=soon", None, "interval", "valid number"),
    ("/live?cells=-1", None, "cells", "from 0"),
]

ASKED = [
    *(("/v1/chat/completions", CHAT | asked, *rest) for asked, *rest in CHATS),
    *(("/v1/completions", *rest) for rest in COMPLETIONS),
    *OTHERS,
]


async def refusal(client, path, body):
    answer = await client.request("GET" if body is None else "POST", path, json=body)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


@in_loop
async def test_what_is_wrong_is_called_as_it_was_asked():
    async with serving(ScriptedEngine(echo), http_port=0) as (server, _):
        url = f"http://127.0.0.1:{server.http_port}"
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            for path, body, param, said in ASKED:
                error = await refusal(client, path, body)
                assert error["param"] == param and said in error["message"], (path, body, error)
                assert error["message"].count(param) == 1 or "beside" in said, error


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"guided_regex": "a"}, "guided_regex"),
        ({"min_tokens": 1, "structured_outputs": {"choice": ["a"]}}, "structured_outputs.choice"),
        ({"min_tokens": 1, "allowed_token_ids": [97]}, "allowed_token_ids"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tools"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_rules_that_leave_no_token_are_named_by_what_asked_for_them(
    asked, field, stream, monkeypatch
):
    def none_left(finish):
        said = "no token may follow the first 2: min_tokens, structured leave none"
        raise RequestError([Violation("sampling", said)])

    monkeypatch.setattr(status, "check_finish", none_left)

    @in_loop
    async def ask():
        async with serving(ScriptedEngine(says(""), LONG), http_port=0) as (server, _):
            url = f"http://127.0.0.1:{server.http_port}/v1/chat/completions"
            async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
                error = await refusal(client, url, CHAT | asked | {"stream": stream})
                assert error["param"] == field
                assert "structured leave" not in error["message"]

    ask()


@in_loop
async def test_what_other_servers_have_at_its_default_asks_for_nothing():
    """As clients send it that fill in every field, and messages that came from elsewhere."""
    defaults = {name: f.get_default() for name, f in ChatNotComputed.model_fields.items()}
    assert {"add_generation_prompt", "echo", "modalities", "verbosity"} <= defaults.keys()
    said = {"role": "assistant", "content": "y", "annotations": [], "audio": None, "refusal": None}
    chat = {"messages": [*CHAT["messages"], said], "max_tokens": 1, "service_tier": "default"}
    chat |= {"safety_identifier": "who", "prompt_cache_key": "where", "documents": []}
    streamed = {"stream": True, "stream_options": {"include_obfuscation": False}}
    async with serving(ScriptedEngine(echo), http_port=0) as (server, _):
        url = f"http://127.0.0.1:{server.http_port}"
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            for body in (chat | defaults, chat | streamed):
                answer = await client.post("/v1/chat/completions", json=body)
                assert answer.status_code == 200, answer.text
            asked = CHAT | {"add_generation_prompt": True}
            answer = await client.post("/tokenize", json=asked)
            assert answer.status_code == 200, answer.text
            noted = said | {"annotations": [{"type": "url_citation"}]}
            error = await refusal(client, "/v1/chat/completions", {"messages": [noted]})
            assert error["param"] == "messages[0].annotations"
    assert Message.model_validate(said).annotations == []
