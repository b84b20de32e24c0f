"""Fields of a body that say which tokens an answer may have: rules, and the form of the whole.

A form is asked for as the OpenAI API does (`response_format`), or as vLLM does: `guided_json` and
its like, or `structured_outputs`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StrictInt, model_validator

from jaxinfer.request import MAX_BAD_WORDS
from jaxinfer.structured import StructuredOutput
from jaxinfer_service.http.strict import Body, Listed, WrongFieldError

Schema = dict[str, Any] | str
_WAYS = ("json", "regex", "choice", "grammar", "json_object")  # of structured_outputs


class JsonSchema(Body):
    """A schema and what it is called. `strict` or not, it is followed to the letter."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if self.json_schema is None and self.type == "json_schema":
            raise WrongFieldError("json_schema", "is missing, which the type json_schema needs")
        if self.json_schema is not None and self.type != "json_schema":
            why = f"belongs to the type json_schema, not to {self.type}"
            raise WrongFieldError("json_schema", why)
        return self

    @property
    def structure(self) -> StructuredOutput | None:
        if self.json_schema is not None:
            return StructuredOutput.json_schema(self.json_schema.schema_)
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
        first, *more = self._forms() or ("",)
        if more:
            raise WrongFieldError(more[0], f"is given beside {first}; an answer has one form")
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

    def called(self, field: str) -> str:
        """What the body calls a field of the runtime."""
        if field == "sampling":  # its rules, which leave no token
            field = next(reversed(self.rules()), "structured")
        if field.split(".")[0] == "structured":
            return next(iter(self._forms()), self.form_field)
        return field

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
        raise WrongFieldError(f"structured_outputs.{way}", "has a value of another kind")
    raise WrongFieldError(
        f"structured_outputs.{way:.100}",
        f"is not known to this server, which would ignore it; give one of {', '.join(_WAYS)}",
    )
