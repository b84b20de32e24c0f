"""What belongs to a chat besides its sampling parameters: messages, tools, template options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from jaxinfer.conversation import Conversation
from jaxinfer.replies import tool_use
from jaxinfer.replies.formats import ReplyFormat
from jaxinfer.request import RequestError
from jaxinfer_service.http.strict import Body, Listed, Several, WrongFieldError

MOST_TOOLS = 1024  # of a request
NAME_CHARACTERS = 256  # of a function's name

Name = Annotated[str, Field(min_length=1, max_length=NAME_CHARACTERS)]


class TextPart(Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """What was called, with arguments as JSON text: as the model wrote it, which may be none."""

    name: Name
    arguments: str = "{}"


class ToolCall(Body):
    """A call in a message of the assistant."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(None, description="Of streamed calls; has no effect.")


class Message(Body):
    """One message of a chat. Its content is a text, or parts of one.

    The assistant's may have calls instead, and the reasoning before, by either name.
    `annotations` are what OpenAI's own answers have, empty where they are about nothing.
    """

    role: str = Field(min_length=1)
    content: str | Several[TextPart] | None = None
    name: str | None = None
    tool_calls: Listed[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    annotations: Annotated[list[Any], Field(default_factory=list, fail_fast=True, max_length=0)]

    @model_validator(mode="after")
    def _of_its_role(self) -> Message:
        assistant = self.role == "assistant"
        if self.content is None and not (assistant and (self.tool_calls or self._thought)):
            raise WrongFieldError(
                "content", "is missing; only the assistant's messages with tool_calls may"
            )
        for field in ("tool_calls", "reasoning_content", "reasoning"):
            if getattr(self, field) and not assistant:
                raise WrongFieldError(field, "is given, and the role is not assistant")
        if self.tool_call_id is not None and self.role != "tool":
            raise WrongFieldError("tool_call_id", "is given, and the role is not tool")
        return self

    @property
    def _thought(self) -> str:
        return self.reasoning_content or self.reasoning or ""

    @property
    def text(self) -> str | None:
        if self.content is None or isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)

    @property
    def for_template(self) -> dict[str, Any]:
        """The message as `Conversation` takes it, with what it has alone."""
        found: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.tool_calls:
            found["tool_calls"] = [
                {"id": call.id, "type": call.type, "function": call.function.model_dump()}
                for call in self.tool_calls
            ]
        more = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self._thought,
        }
        return found | {name: value for name, value in more.items() if value}


class Function(Body):
    """A function that the model may call. `parameters` is a JSON schema, of an object."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function

    @property
    def offered(self) -> tool_use.Tool:
        function = self.function
        description, strict = function.description or "", bool(function.strict)
        return tool_use.Tool(function.name, description, function.parameters, strict)


class NamedFunction(Body):
    """Which function is to be called."""

    name: Name


class NamedTool(Body):
    """A tool that is to be called."""

    type: Literal["function"]
    function: NamedFunction


Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=MOST_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool


class Templated(Body):
    """What a chat template is given besides messages.

    `tool_choice`: none, auto (the default with tools), required, or one by its name.
    """

    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Further variables of the model's chat template, which must read them."
    )
    reasoning_effort: str | None = Field(
        None, description="A variable of some chat templates; none: without, where it has a switch."
    )

    @model_validator(mode="after")
    def _choice_of_tools(self) -> Templated:
        try:
            self.tool_use()
        except RequestError as error:
            (wrong,) = error.violations
            raise WrongFieldError(wrong.field, wrong.message) from error
        if self.tool_choice == "auto" and not self.tools:
            raise WrongFieldError("tool_choice", "is given, and there are no tools")
        if self.reasoning_effort and "reasoning_effort" in (self.chat_template_kwargs or {}):
            why = "is given in chat_template_kwargs too; give one"
            raise WrongFieldError("reasoning_effort", why)
        return self

    def tool_use(self, parallel: bool = True) -> tool_use.ToolUse:
        """Which tools may or must be called."""
        offered, choice = [tool.offered for tool in self.tools or ()], self.tool_choice
        if isinstance(choice, NamedTool):
            return tool_use.ToolUse(offered, named=choice.function.name, parallel=parallel)
        return tool_use.ToolUse(offered, choice or tool_use.AUTO, parallel=parallel)

    def conversation(
        self, messages: Sequence[Message], form: ReplyFormat | None = None, parallel: bool = True
    ) -> Conversation:
        """Messages with what belongs to them; without tools where none may be called. `form`: of
        the replies, which nobody reads without. Raises RequestError for what cannot be honoured."""
        options = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort:
            options["reasoning_effort"] = self.reasoning_effort
        use = self.tool_use(parallel)
        replies = None if form is None else use.replies(form)
        asked = [message.for_template for message in messages]
        return Conversation(asked, use.for_template, options, replies)


BODIES = (TextPart, CalledFunction, ToolCall, Message, Function, Tool, NamedFunction, NamedTool)
