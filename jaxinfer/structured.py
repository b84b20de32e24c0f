"""What form an output must have: the structure that a request asks for, as data.

`StructuredOutput` says it; `grammar.py` makes what computes masks of it. Host only, and picklable.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

Kind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The form of an output: made by one of the class's methods.

    Attributes:
        kind: which of them made it.
        source: what it was given, as text: a JSON schema, a regular expression, a grammar, or the
            choices as a JSON list.
    """

    kind: Kind
    source: str = ""

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> StructuredOutput:
        """A JSON value that a schema accepts, given as a mapping or as JSON text.

        Raises ValueError for what JSON cannot say.
        """
        if isinstance(schema, str):
            return cls("json_schema", schema)
        try:
            return cls("json_schema", json.dumps(schema, ensure_ascii=False, allow_nan=False))
        except (TypeError, RecursionError) as error:
            raise ValueError(f"the schema is no JSON: {error}") from error

    @classmethod
    def json_object(cls) -> StructuredOutput:
        """Any JSON object."""
        return cls("json_object")

    @classmethod
    def regex(cls, pattern: str) -> StructuredOutput:
        """A text that the whole of a regular expression matches (Rust's syntax: no references back
        or around)."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Iterable[str]) -> StructuredOutput:
        """One of these texts."""
        return cls("choice", json.dumps(list(texts), ensure_ascii=False))

    @classmethod
    def grammar(cls, text: str) -> StructuredOutput:
        """A text of a context-free grammar, in Lark's form or in GBNF (EBNF)."""
        return cls("grammar", text)
