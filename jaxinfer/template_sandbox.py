"""The Jinja that chat templates run in: sandboxed, marked and metered.

Templates come from checkpoints, which are data: they run in Jinja's immutable sandbox, with the
helpers that template writers rely on. What a template writes is marked (`template_text`), and the
work it takes is metered: every call, operator, filter, pass of a loop and piece of output looks
whether the time is up.
"""

from __future__ import annotations

import datetime
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter

from jaxinfer.template_filters import metered_filters
from jaxinfer.template_limits import check_operands, check_size, check_widths, made, spelled
from jaxinfer.template_text import MarkedText, joined, like

_METHODS_WITHOUT_USE = ("encode", "expandtabs", "maketrans", "to_bytes", "translate")
_GROWING = ("center", "format", "format_map", "join", "ljust", "replace", "rjust", "zfill")


class TemplateRefusal(ValueError):
    """What a template says when it refuses its messages."""


class _Generation(Extension):
    """`{% generation %}` marks what training learns from; for serving its body is plain text."""

    tags = {"generation"}  # noqa: RUF012 -- the class attribute Jinja documents

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _MarkingGenerator(CodeGenerator):
    """Makes literals marked, concatenation ours, and loops metered; leaves all work to run time."""

    def visit_Const(self, node: nodes.Const, frame: Frame) -> None:
        if isinstance(node.value, str):
            self.write(_literal(node.value))
        else:
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: nodes.TemplateData, frame: Frame) -> None:
        self.write(_literal(node.data))

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        return _literal("".join(group))

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.Const | nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, frame, finalize)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("concat((")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write("))")

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        tick = nodes.Call(
            nodes.EnvironmentAttribute("tick"), [], [], None, None, lineno=node.lineno
        )
        node.body.insert(0, nodes.ExprStmt(tick, lineno=node.lineno))
        super().visit_For(node, frame)


def _literal(text: str) -> str:
    """Python source of a text that the template wrote."""
    return f"environment.literal({text!r})"


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Of one template. Within `metered`, renders to `MarkedText`."""

    code_generator_class = _MarkingGenerator
    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _Generation],
            finalize=spelled,
            optimized=False,
        )
        self.literal = functools.cache(MarkedText.written)
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        del self.globals["lipsum"]
        self.filters = metered_filters()

    def tick(self) -> None:
        """Called once a pass of every loop; being a call is what is metered."""

    def concat(self, pieces: Iterable[Any]) -> MarkedText:  # type: ignore[override]
        """What Jinja puts output, bodies of macros and operands of `~` together with."""
        return joined(made(str(spelled(piece))) for piece in pieces)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(__obj, types.BuiltinMethodType) and type(__obj.__self__) is str:
            # Methods of messages' strings may put the template's words in, or make much of little.
            __obj = getattr(MarkedText.of(__obj.__self__), __obj.__name__)
        return made(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if type(left) is str:
            left = MarkedText.of(left)
        check_operands(operator, left, right)
        return made(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if attr in _METHODS_WITHOUT_USE and isinstance(obj, str | int):
            return False
        if attr in _GROWING and hasattr(obj, "__html__"):  # escaped text, which nothing bounds
            return False
        if isinstance(obj, MarkedText) and not hasattr(str, attr):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None or hasattr(value.__self__, "__html__"):
            return None
        form = MarkedText.of(value.__self__)

        def format_(*args: Any, **kwargs: Any) -> str:
            if value.__name__ == "format_map":
                args, kwargs = (), *args
            return _Formatter(self).filled(form, args, kwargs)

        return format_


class _Formatter(SandboxedFormatter):
    """One `str.format` that keeps marks: fields are noted as they come."""

    def filled(self, form: MarkedText, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        self._fields: list[str] = []
        self._size = 0
        return like(self.vformat(form, args, kwargs), self._pieces(form))

    def format_field(self, value: Any, format_spec: str) -> str:
        check_widths(format_spec)
        field = value
        if not isinstance(value, str) or format_spec:
            field = super().format_field(spelled(value), format_spec)
        self._size += len(field)
        check_size(self._size)
        self._fields.append(field)
        return field

    def _pieces(self, form: MarkedText) -> Iterator[str]:
        _, marks = form.unmarked()
        fields = iter(self._fields)
        for literal, name, spec, _ in self.parse(form):
            yield literal if 0 in marks else MarkedText.written(literal)
            if name is not None:
                for _, inner, _, _ in self.parse(spec or ""):
                    if inner is not None:
                        next(fields)  # of the field's own form
                yield next(fields)


def _raise_exception(message: str) -> None:
    raise TemplateRefusal(str(spelled(message)))


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
