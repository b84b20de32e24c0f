"""Rules and structures through gRPC, HTTP, the client and the command line: what reaches the
engine, and what is refused by the name of the field that asked for it."""

from __future__ import annotations

import contextlib
import json

import httpx2 as httpx
import openai
import pytest
import typer
from fake_engine import ScriptedEngine, says
from google.protobuf.json_format import MessageToDict
from grpc import StatusCode as Code
from jaxinfer_service import wire
from jaxinfer_service.cli import rule_options
from jaxinfer_service.client import generate_request, violations
from jaxinfer_service.pb.jaxinfer.v1 import inference_pb2 as pb
from jaxinfer_service.status import check_finish
from serving import in_loop, refused, serving

from jaxinfer.request import FinishReason, RequestError
from jaxinfer.structured import KINDS
from jaxinfer.structured import StructuredOutput as S
from jaxinfer.text import Finish

SCHEMA = {"type": "object", "properties": {"é": {"type": "null"}}}
FORMS = [
    ({"json_schema": SCHEMA}, S.json_schema(SCHEMA)),
    ({"json_schema": json.dumps(SCHEMA)}, S.json_schema(json.dumps(SCHEMA))),
    ({"json_object": True}, S.json_object()),
    ({"regex": "a|b"}, S.regex("a|b")),
    ({"choice": ["a", "é"]}, S.choice(["a", "é"])),
    ({"grammar": 'start: "a"'}, S.grammar('start: "a"')),
]


@pytest.mark.parametrize(("form", "structure"), FORMS)
def test_every_form_goes_over_the_wire_and_back(form, structure):
    request = generate_request("x", structured=form)
    parsed = wire.parse(pb.GenerateRequest, request.SerializeToString())
    assert wire.params_of(parsed.sampling) == {"structured": structure}
    again = generate_request("x", structured=parsed.sampling.structured)
    assert MessageToDict(again) == MessageToDict(parsed)


def test_the_wire_has_every_kind():
    assert {f.name for f in pb.StructuredOutput.DESCRIPTOR.oneofs[0].fields} == {*KINDS}


class Asked(ScriptedEngine):
    """Keeps what it was asked."""

    def __init__(self):
        super().__init__(says("a"))
        self.requests = []

    def execute(self, command, now):
        if hasattr(command, "request"):
            self.requests.append(command.request)
        super().execute(command, now)


RULES = {"min_tokens": 1, "allowed_token_ids": [97, 98, 256], "bad_words": ["cd"]}


@in_loop
async def test_rules_reach_the_engine_over_grpc():
    engine = Asked()
    async with serving(engine) as (_, client):
        for form, _ in FORMS:
            await client.generate("x", max_new_tokens=9, n=2, structured=form, **RULES)
        await client.generate("x", max_new_tokens=9, min_tokens=0)
    *ruled, plain = engine.requests
    assert plain.rules is None and len(ruled) == 2 * len(FORMS)
    for (_, structure), first, second in zip(FORMS, ruled[::2], ruled[1::2]):
        rules = first.rules
        assert rules == second.rules and first.group == second.group != ""
        assert (rules.min_tokens, rules.allowed, rules.end_ids) == (1, (97, 98, 256), (256,))
        assert rules.bad_words == ((99, 100),) and rules.structure == structure


BAD = [
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 64}, "min_tokens"),
    ({"allowed_token_ids": [1, 257]}, "allowed_token_ids[1]"),
    ({"allowed_token_ids": [2**63 - 1]}, "allowed_token_ids[0]"),
    ({"bad_words": ["a", ""]}, "bad_words[1]"),
    ({"structured": {}}, "structured"),
    ({"structured": {"json_object": False}}, "structured"),
    ({"structured": {"json_schema": "{"}}, "structured.json_schema"),
    ({"structured": {"json_schema": {"type": "nope"}}}, "structured.json_schema"),
    ({"structured": {"json_schema": {"$ref": "#/x"}}}, "structured.json_schema"),
    ({"structured": {"regex": "a("}}, "structured.regex"),
    ({"structured": {"choice": []}}, "structured.choice"),
    ({"structured": {"grammar": "start: nothing"}}, "structured.grammar"),
    ({"structured": {"json_object": True}, "ignore_eos": True}, "structured"),
]


@in_loop
async def test_what_cannot_be_is_named_over_grpc():
    engine = Asked()
    async with serving(engine) as (_, client):
        for sampling, field in BAD:
            error = await refused(client.generate("x", **sampling))
            assert error.code() is Code.INVALID_ARGUMENT, (sampling, error)
            assert list(violations(error)) == [f"sampling.{field}"], error.details()
        assert engine.counters.received == 0
        assert (await client.generate("x")).text == "a"


def test_an_output_whose_rules_leave_no_token_was_asked_for_wrongly():
    with pytest.raises(RequestError) as caught:
        check_finish(Finish(FinishReason.RULES, error="none is left"))
    assert [(v.field, v.message) for v in caught.value.violations] == [("sampling", "none is left")]


@contextlib.asynccontextmanager
async def http(engine):
    async with serving(engine, http_port=0) as (server, _):
        url = f"http://127.0.0.1:{server.http_port}"
        async with (
            httpx.AsyncClient(base_url=url, timeout=60) as plain,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            yield plain, client


FIELDS = [
    ({"response_format": {"type": "json_object"}}, S.json_object()),
    (
        {"response_format": {"type": "json_schema", "json_schema": {
            "name": "n", "strict": True, "schema": SCHEMA}}},
        S.json_schema(SCHEMA),
    ),
    ({"response_format": {"type": "text"}}, None),
    ({"guided_json": SCHEMA}, S.json_schema(SCHEMA)),
    ({"guided_json": "true"}, S.json_schema("true")),
    ({"guided_regex": "a+"}, S.regex("a+")),
    ({"guided_choice": ["a", "b"]}, S.choice(["a", "b"])),
    ({"guided_grammar": 'root ::= "a"'}, S.grammar('root ::= "a"')),
    ({"structured_outputs": {"json": SCHEMA}}, S.json_schema(SCHEMA)),
    ({"structured_outputs": {"regex": "a", "choice": None}}, S.regex("a")),
    ({"structured_outputs": {"choice": ["a"]}}, S.choice(["a"])),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, S.grammar('start: "a"')),
    ({"structured_outputs": {"json_object": True}}, S.json_object()),
    ({"structured_outputs": {}}, None),
]  # fmt: skip


@in_loop
async def test_rules_reach_the_engine_over_http():
    engine = Asked()
    async with http(engine) as (_, client):
        for fields, _ in FIELDS:
            await client.completions.create(
                model="fake", prompt="x", max_tokens=9, extra_body=fields | RULES
            )
        await client.chat.completions.create(
            model="fake", messages=[{"role": "user", "content": "x"}], max_tokens=9,
            response_format={"type": "json_object"}, extra_body=RULES, stream=True,
        )  # fmt: skip
    asked = [*(structure for _, structure in FIELDS), S.json_object()]
    assert [request.rules.structure for request in engine.requests] == asked
    for request in engine.requests:
        rules = request.rules
        assert (rules.min_tokens, rules.allowed) == (1, (97, 98, 256))
        assert rules.bad_words == ((99, 100),)


BAD_FIELDS = [
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n"}}},
     "response_format.json_schema.schema", "required"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "odd": 1}}},
     "response_format.json_schema.odd", "not known"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "odd"}}}},
     "response_format", "Invalid type"),
    ({"guided_regex": "a("}, "guided_regex", ""),
    ({"guided_choice": []}, "guided_choice", "at least one text"),
    ({"guided_json": 3}, "guided_json", "valid"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", ""),
    ({"structured_outputs": {"structural_tag": "x"}},
     "structured_outputs.structural_tag", "not known"),
    ({"structured_outputs": {"regex": 3}}, "structured_outputs.regex", "another kind"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "beside guided_regex"),
    ({"guided_json": {}, "ignore_eos": True}, "guided_json", "stop_token_ids"),
    ({"min_tokens": 17}, "min_tokens", "16"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "empty"),
    ({"bad_words": ["x"] * 129}, "bad_words", "128"),
]  # fmt: skip


@in_loop
async def test_what_cannot_be_is_named_over_http():
    engine = Asked()
    async with http(engine) as (plain, _):
        for fields, param, said in BAD_FIELDS:
            answer = await plain.post("/v1/completions", json={"prompt": "x"} | fields)
            error = answer.json()["error"]
            assert answer.status_code == 400, (fields, error)
            assert (error["type"], error["param"]) == ("invalid_request_error", param), error
            assert said in error["message"], error
        assert engine.counters.received == 0


def options(**given):
    return rule_options.RuleOptions(**given).params()


def test_options_of_the_command_line(tmp_path):
    file = tmp_path / "given"
    file.write_text(json.dumps(SCHEMA))
    assert options() == {}
    assert options(min_tokens=3, allowed_token_ids="1, 2", bad_word=["a"], json_object=True) == {
        "min_tokens": 3,
        "allowed_token_ids": (1, 2),
        "bad_words": ("a",),
        "structured": S.json_object(),
    }
    for given in (str(file), json.dumps(SCHEMA)):
        assert options(json_schema=given) == {"structured": S.json_schema(json.dumps(SCHEMA))}
    assert options(regex="a") == {"structured": S.regex("a")}
    assert options(choice=["a"]) == {"structured": S.choice(["a"])}
    assert options(grammar=file) == {"structured": S.grammar(json.dumps(SCHEMA))}
    for wrong in (
        {"allowed_token_ids": "1;2"},
        {"json_schema": str(tmp_path / "none")},
        {"regex": "a", "choice": ["a"]},
    ):
        with pytest.raises(typer.BadParameter):
            options(**wrong)
