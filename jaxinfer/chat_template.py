"""A model's own chat template (Jinja): a conversation in, its text out.

Messages are rendered as they are. In the text every character is known to be the template's own or
not (`template_text`), since special tokens count only where the template wrote them. A template
that takes too long or makes too much is refused (`template_limits`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes

from jaxinfer.template_limits import TemplateLimitError, metered
from jaxinfer.template_sandbox import TemplateEnvironment, TemplateRefusal
from jaxinfer.template_text import MarkedText

# Templates spell marks around roles, `<|user|>` for one, so a role may be part of a special token.
_ROLES = frozenset({
    "system", "user", "assistant", "tool", "developer", "function", "model",
    "ipython", "environment", "observation", "document", "documents", "context", "critic",
})  # fmt: skip


class ChatTemplateError(ValueError):
    """The template is missing or broken, or refuses these messages (its own words are kept)."""


class ChatTemplateFailure(ChatTemplateError):
    """The template's code fails on these messages, which it expects in another form."""


class ChatTemplate:
    """A compiled template. Rendering is pure: same messages, same text (but for `strftime_now`).

    Attributes:
        variables: the names that it reads of what it is given, `enable_thinking` for one.
    """

    def __init__(self, source: str, variables: Mapping[str, str], name: str = "default"):
        """`variables` are what the template may name besides messages, bos_token for one; they
        count as written in it. `name` is for messages.

        Raises ChatTemplateError when the template does not parse.
        """
        self.source = source
        self.name = name
        self._variables = {key: MarkedText.written(text) for key, text in variables.items()}
        try:
            self._template, words, self.variables = _compiled(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"chat template does not parse: {_said(error)}") from error
        self._roles = _ROLES | words

    def render(self, messages: Sequence[Mapping[str, Any]], **values: Any) -> tuple[str, bytes]:
        """The text of a conversation, and a byte for each of its characters: 1 where the template
        wrote it, 0 where it comes from `messages` or `values`.

        A role that is one of the usual ones, or that the template names, counts as its own word.

        Raises ChatTemplateError with the template's objection, or with the limit that it exceeds.
        """
        messages = [self._with_role(message) for message in messages]
        try:
            with metered():
                text = self._template.render(self._variables | values, messages=messages)
        except TemplateRefusal as refusal:
            raise ChatTemplateError(f"chat template refuses: {refusal}") from refusal
        except TemplateLimitError as error:
            raise ChatTemplateError(
                f"chat template {self.name!r} {error}; send less, or use another template"
            ) from error
        except Exception as error:  # a template may fail in any way Python expressions can
            said = str(error) or type(error).__name__
            raise ChatTemplateFailure(f"chat template failed: {said}") from error
        return MarkedText.of(text).unmarked()

    def _with_role(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or role not in self._roles:
            return message
        return {**message, "role": MarkedText.written(role)}


def read_chat_template(path: str | Path) -> str:
    """The chat template in a file, known to parse. Raises ChatTemplateError naming the file."""
    path = Path(path).expanduser()
    try:
        source = path.read_text("utf-8")
        _compiled(source)
    except UnicodeDecodeError as error:
        raise ChatTemplateError(f"chat template {path}: is not UTF-8: {error.reason}") from error
    except OSError as error:
        raise ChatTemplateError(f"chat template {path} cannot be read: {error.strerror}") from error
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"chat template {path}: {_said(error)}") from error
    if not source.strip():
        raise ChatTemplateError(f"chat template {path}: is empty")
    return source


def _compiled(source: str) -> tuple[jinja2.Template, frozenset[str], frozenset[str]]:
    """A template, all strings that it names, and all variables that it reads.

    Raises jinja2.TemplateError.
    """
    environment = TemplateEnvironment()
    try:
        parsed = environment.parse(source)
        words = frozenset(node.value for node in parsed.find_all(nodes.Const) if _is_text(node))
        again = environment.parse(source)  # finding its variables folds constants
        names = meta.find_undeclared_variables(again) - environment.globals.keys()
        return environment.from_string(parsed), words, frozenset(names)
    except (RecursionError, MemoryError, SyntaxError) as error:  # of the Python it is made into
        raise jinja2.TemplateError("is nested too deeply, or too long") from error


def _is_text(node: nodes.Const) -> bool:
    return isinstance(node.value, str)


def _said(error: jinja2.TemplateError) -> str:
    """Jinja's message, with the line it is about."""
    line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
    return f"{line}{error.message or error}"
