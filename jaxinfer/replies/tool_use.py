"""Which tools a reply may call, and which it must: what follows from it, whoever asks.

The names are those of the OpenAI API, and so are the fields of what is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxinfer.replies.formats import TOLD, ReplyFormat
from jaxinfer.replies.promised import only_calls, tagged_calls
from jaxinfer.replies.reader import Replies, replies_with
from jaxinfer.request import RequestError, SamplingParams, Violation
from jaxinfer.structured import StructuredOutput

AUTO, NONE, REQUIRED = CHOICES = ("auto", "none", "required")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that may be called; `parameters` is the JSON schema of an object. `strict`: the
    arguments of its calls must follow that."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    @property
    def for_template(self) -> dict[str, Any]:
        """As templates know it, which all want a description and parameters."""
        parameters = self.parameters or {"type": "object", "properties": {}}
        told = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": told}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools of a chat.

    Attributes:
        tools: no two of one name.
        choice: "auto", the model decides; "none", it is not told of them; "required", it must call.
        named: the only one that must be called, whatever the choice; "" for none.
        parallel: whether there may be several calls.

    Raises RequestError where these do not fit together.
    """

    tools: Sequence[Tool] = ()
    choice: str = AUTO
    named: str = ""
    parallel: bool = True

    def __post_init__(self) -> None:
        names = set[str]()
        for index, tool in enumerate(self.tools):
            if not tool.name or tool.name in names:
                why = f"is {tool.name!r}, as another tool's" if tool.name else "is empty"
                raise _refusal(f"tools[{index}].function.name", f"{why}; names tell them apart")
            names.add(tool.name)
            if (kind := (tool.parameters or {}).get("type", "object")) != "object":
                why = f"describes {kind!r:.100}; arguments have names, so its type is 'object'"
                raise _refusal(f"tools[{index}].function.parameters", why)
        if self.choice not in CHOICES:
            why = f"is {self.choice!r}; it is one of {', '.join(CHOICES)}, or names a tool"
            raise _refusal("tool_choice", why)
        if (self.named or self.choice == REQUIRED) and not names:
            raise _refusal("tool_choice", "is given, and there are no tools")
        if self.named and self.named not in names:
            raise _refusal("tool_choice", f"names {self.named!r}, which is none of tools")

    @property
    def must_call(self) -> bool:
        return self.choice == REQUIRED or bool(self.named)

    @property
    def told(self) -> Sequence[Tool]:
        """Those that the model is told of."""
        return () if self.choice == NONE and not self.named else self.tools

    @property
    def for_template(self) -> list[dict[str, Any]]:
        return [tool.for_template for tool in self.told]

    def replies(self, form: ReplyFormat) -> Replies | None:
        """How replies in this form are read; None as they are. Raises RequestError."""
        schemas = {tool.name: tool.parameters or {} for tool in self.told}
        return replies_with(form, schemas, self.parallel, self.must_call)

    def promised(self) -> StructuredOutput | None:
        """The form of a reply that must be calls; None where it may be something else."""
        if not self.must_call:
            return None
        offered = [tool for tool in self.tools if self.named in ("", tool.name)]
        schemas = {tool.name: tool.parameters or {} for tool in offered}
        return only_calls(schemas, several=self.parallel and not self.named)

    def strict(self, form: ReplyFormat) -> StructuredOutput | None:
        """The form of a reply that may have calls, some of them of strict tools; None without.

        Raises RequestError where a model writes calls in a form that it cannot be held to.
        """
        strict = [index for index, tool in enumerate(self.told) if tool.strict]
        if not strict or self.must_call:
            return None
        if form.tool_parser != TOLD:
            why = (
                "is true, to which calls in this model's form are held with tool_choice required or"
                " a function's name only; set that, or leave it out"
            )
            raise _refusal(f"tools[{strict[0]}].function.strict", why)
        return tagged_calls(
            {tool.name: tool.parameters if tool.strict else None for tool in self.told}
        )

    def held[P: SamplingParams | Mapping[str, Any]](self, params: P, form: ReplyFormat) -> P:
        """`params` with the form that a reply must have for these tools, if there is one.

        Raises RequestError where `params` ask for another, or for what JSON cannot say.
        """
        try:
            structure = self.promised() or self.strict(form)
        except RequestError:
            raise
        except ValueError as error:
            raise _refusal("tools", str(error)) from error
        if structure is None:
            return params
        mapped = isinstance(params, Mapping)
        if (params.get("structured") if mapped else params.structured) is not None:  # type: ignore
            why = "must be called, or are strict, and the answer is to have another form too"
            raise _refusal("tools", f"{why}; it has one")
        if mapped:
            return {**params, "structured": structure}  # type: ignore[dict-item, return-value]
        return dataclasses.replace(params, structured=structure)  # type: ignore[type-var]


def tool_use(
    tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any], parallel: bool = True
) -> ToolUse:
    """From the OpenAI API's form, as Python has it. Raises RequestError for another."""
    found = [_tool(index, tool) for index, tool in enumerate(tools)]
    if isinstance(choice, str):
        return ToolUse(found, choice, parallel=parallel)
    try:
        return ToolUse(found, named=str(choice["function"]["name"]), parallel=parallel)
    except (KeyError, TypeError) as error:
        why = f"""is {choice!r}; a tool is named as {{"function": {{"name": …}}}}"""
        raise _refusal("tool_choice", why) from error


_FIELDS = {"name": str, "description": str, "parameters": Mapping, "strict": bool}


def _tool(index: int, tool: Mapping[str, Any]) -> Tool:
    field = f"tools[{index}]"
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or set(tool) - {"type", "function"}:
        why = """is no tool such as {"type": "function", "function": {"name": …}}"""
        raise _refusal(field, why)
    given = {name: value for name, value in function.items() if value is not None}
    for name, value in given.items():
        if name not in _FIELDS:
            raise _refusal(f"{field}.function.{name}", f"is not known; {', '.join(_FIELDS)} are")
        if not isinstance(value, _FIELDS[name]):
            raise _refusal(f"{field}.function.{name}", f"is {value!r}, which is of another kind")
    return Tool(given.pop("name", ""), **given)


def _refusal(field: str, why: str) -> RequestError:
    return RequestError([Violation(field, why)])
