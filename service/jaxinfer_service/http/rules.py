"""Fields of a body that say which tokens an answer may have: rules, and the form of the whole.

A form is asked for as the OpenAI API does (`response_format`), or as vLLM does: `guided_json` and
its like, or `structured_outputs`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictInt, model_validator

from jaxinfer.request import MAX_BAD_WORDS, RequestError, Violation
from jaxinfer.structured import StructuredOutput
from jaxinfer_service.http.strict import Body, Listed

Schema = dict[str, Any] | str
_OF_SCHEMA = {"name", "description", "schema", "strict"}
_WAYS = ("json", "regex", "choice", "grammar", "json_object")  # of structured_outputs


class ResponseFormat(Body):
    """The form of an answer. `json_schema` has a name, a description, a schema, and whether it is
    strict: it is followed to the letter either way."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        said = self.json_schema
        if said is None and self.type == "json_schema":
            raise ValueError("json_schema is missing, which the type json_schema needs")
        if said is not None and self.type != "json_schema":
            raise ValueError(f"json_schema belongs to the type json_schema, not to {self.type}")
        if said is not None:
            if unknown := sorted(said.keys() - _OF_SCHEMA):
                raise ValueError(f"json_schema has {unknown[0]!r:.100}, which is not known")
            if not isinstance(said.get("schema"), dict):
                raise ValueError("json_schema.schema is missing, or no JSON schema")
        return self

    @property
    def structure(self) -> StructuredOutput | None:
        if self.json_schema is not None:
            return StructuredOutput.json_schema(self.json_schema["schema"])
        return StructuredOutput.json_object() if self.type == "json_object" else None


class Ruled(Body):
    """What completions and chats may ask of the tokens of an answer."""

    form_field: ClassVar[str] = "structured"  # that asked for a form, if none of those here did

    min_tokens: int | None = None
    allowed_token_ids: Listed[StrictInt] | None = None
    bad_words: Annotated[list[str], Field(fail_fast=True, max_length=MAX_BAD_WORDS)] | None = None
    response_format: ResponseFormat | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Listed[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = Field(
        None, description="One of json, regex, choice, grammar (Lark or GBNF) and json_object."
    )

    @model_validator(mode="after")
    def _one_form(self) -> Ruled:
        if len(forms := self._forms()) > 1:
            raise ValueError(f"{' and '.join(forms)} are given; an answer has one form")
        return self

    def rules(self) -> dict[str, Any]:
        """The sampling parameters that are set, by the runtime's names."""
        given = {
            "min_tokens": self.min_tokens,
            "allowed_token_ids": self.allowed_token_ids and tuple(self.allowed_token_ids),
            "bad_words": self.bad_words and tuple(self.bad_words),
            "structured": next(iter(self._forms().values()), None),
        }
        return {name: value for name, value in given.items() if value is not None}

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Violations found within name the field that asked for the form of the answer."""
        try:
            yield
        except RequestError as error:
            field = next(iter(self._forms()), self.form_field)
            found = error.violations
            named = [field if v.field.split(".")[0] == "structured" else v.field for v in found]
            raise RequestError(
                [Violation(name, v.message) for name, v in zip(named, found)]
            ) from error

    def _forms(self) -> dict[str, StructuredOutput]:
        """The forms that are asked for, by the fields that do."""
        forms: dict[str, StructuredOutput | None] = {}
        if self.response_format is not None:
            forms["response_format"] = self.response_format.structure
        if self.guided_json is not None:
            forms["guided_json"] = StructuredOutput.json_schema(self.guided_json)
        if self.guided_regex is not None:
            forms["guided_regex"] = StructuredOutput.regex(self.guided_regex)
        if self.guided_choice is not None:
            forms["guided_choice"] = StructuredOutput.choice(self.guided_choice)
        if self.guided_grammar is not None:
            forms["guided_grammar"] = StructuredOutput.grammar(self.guided_grammar)
        for way, value in (self.structured_outputs or {}).items():
            if value is not None:
                forms[f"structured_outputs.{way}"] = _way(way, value)
        return {field: form for field, form in forms.items() if form is not None}


def _way(way: str, value: Any) -> StructuredOutput | None:
    """One entry of structured_outputs. Raises ValueError for what is none."""
    text = isinstance(value, str)
    if way == "json" and (text or isinstance(value, dict)):
        return StructuredOutput.json_schema(value)
    if way == "regex" and text:
        return StructuredOutput.regex(value)
    if way == "grammar" and text:
        return StructuredOutput.grammar(value)
    if way == "choice" and isinstance(value, list) and all(isinstance(c, str) for c in value):
        return StructuredOutput.choice(value)
    if way == "json_object" and isinstance(value, bool):
        return StructuredOutput.json_object() if value else None
    if way in _WAYS:
        raise ValueError(f"structured_outputs.{way} has a value of another kind")
    raise ValueError(
        f"structured_outputs.{way:.100} is not known to this server, which would ignore it; give"
        f" one of {', '.join(_WAYS)}"
    )
