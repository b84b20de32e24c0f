"""Bodies that are honoured or refused: unknown fields are refused, and null is left out."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from jaxinfer.request import RequestError, Violation

# A long list is wrong from the first wrong entry on: thousands of errors would cost gigabytes.
type Listed[T] = Annotated[list[T], Field(fail_fast=True)]
type Several[T] = Annotated[list[T], Field(min_length=1, fail_fast=True)]
OneOrMore = str | Listed[str]

MOST_UNKNOWN = 8  # unknown fields that a refusal names


class WrongFieldError(ValueError):
    """What is wrong with `field` of a body, where that was found by what is beside it."""

    def __init__(self, field: str, why: str):
        self.field, self.why = field, why
        super().__init__(f"{field} {why}")


@contextlib.contextmanager
def renamed(rename: Callable[[Violation], Violation]) -> Iterator[None]:
    """Violations found within name fields as the body does."""
    try:
        yield
    except RequestError as error:
        raise RequestError([*map(rename, error.violations)]) from error


def _nullable(schema: dict[str, Any]) -> None:
    """In the document of a body, null is a value of every field that may be left out."""
    null, besides = {"type": "null"}, ("title", "description", "default")
    for name, field in schema.get("properties", {}).items():
        if name not in schema.get("required", ()) and null not in field.get("anyOf", ()):
            said = {key: field.pop(key) for key in besides if key in field}
            schema["properties"][name] = {"anyOf": [field, null]} | said


class Body(BaseModel):
    """Strict: no field that is not known, no text where a number belongs. null is left out."""

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra=_nullable)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        """Without null, and with no more unknown fields than a refusal names."""
        if not isinstance(given, dict):
            return given
        known = {field.alias or name for name, field in cls.model_fields.items()}
        said = {name: value for name, value in given.items() if value is not None}
        unknown = itertools.islice((name for name in said if name not in known), MOST_UNKNOWN)
        shown = {name.encode(errors="backslashreplace").decode(): 0 for name in unknown}
        return {name: value for name, value in said.items() if name in known} | shown
