"""A model's own chat template (Jinja), rendered in a sandbox.

Templates come from checkpoints, which are data: they run in Jinja's immutable sandbox, with the
few helpers that template writers rely on.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(ValueError):
    """The template is missing or broken, or refuses these messages (its own words are kept)."""


class _GenerationTag(Extension):
    """`{% generation %}` marks what training learns from; for serving its body is plain text."""

    tags = {"generation"}  # noqa: RUF012 -- the class attribute Jinja documents

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template. Rendering is pure: same messages, same text (but for `strftime_now`)."""

    def __init__(self, source: str, variables: dict[str, Any]):
        """`variables` are what the template may name besides messages, bos_token for one.

        Raises ChatTemplateError when the template does not parse.
        """
        self.source = source
        self._variables = variables
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"chat template does not parse: {_said(error)}") from error

    def render(self, **values: Any) -> str:
        """The text of a conversation. Raises ChatTemplateError with the template's objection."""
        try:
            return self._template.render(**(self._variables | values))
        except ChatTemplateError:
            raise
        except Exception as error:  # a template may fail in any way Python expressions can
            raise ChatTemplateError(f"chat template failed: {error}") from error


def read_chat_template(path: str | Path) -> str:
    """The chat template in a file, known to parse. Raises ChatTemplateError naming the file."""
    path = Path(path).expanduser()
    try:
        source = path.read_text("utf-8")
        _environment().from_string(source)
    except UnicodeDecodeError as error:
        raise ChatTemplateError(f"chat template {path}: is not UTF-8: {error.reason}") from error
    except OSError as error:
        raise ChatTemplateError(f"chat template {path} cannot be read: {error.strerror}") from error
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"chat template {path}: {_said(error)}") from error
    if not source.strip():
        raise ChatTemplateError(f"chat template {path}: is empty")
    return source


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _said(error: jinja2.TemplateError) -> str:
    """Jinja's message, with the line it is about."""
    line = f"line {error.lineno}: " if isinstance(error, jinja2.TemplateSyntaxError) else ""
    return f"{line}{error.message or error}"


def _raise_exception(message: str) -> None:
    raise ChatTemplateError(f"chat template refuses: {message}")


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: Jinja's own filter would escape for HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
