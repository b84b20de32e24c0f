"""Options that several commands share, and how their values are written."""

from __future__ import annotations

import difflib
import os
import re
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from jaxinfer_service.cli.foreign import ADVICE

LOGGED = 1000  # characters of a prompt
VARIABLES = "JAXINFER"  # JAXINFER_COMMAND_OPTION in the environment
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20}
_SIZE_UNITS = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def parse_count(value: str | int) -> int:
    """A number of tokens or requests: 8192, 8k (8000), 8K (8192), 1.5k."""
    return _parse(value, _COUNT_UNITS, "a number such as 8192, 8k (8000) or 8K (8192)")


def parse_size(value: str | int) -> int:
    """A number of bytes: 2GiB, 2GB, 512MiB, 1073741824."""
    return _parse(value, _SIZE_UNITS, "a size such as 2GiB (2^30 each) or 2GB (10^9 each)")


def _parse(value: str | int, units: dict[str, int], what: str) -> int:
    match = _NUMBER.fullmatch(str(value).strip())
    if match is None or match[2] not in units:
        raise typer.BadParameter(f"{value!r} is not {what}")
    return (
        round(float(match[1]) * units[match[2]])
        if "." in match[1]
        else (int(match[1]) * units[match[2]])
    )


class Command(TyperCommand):
    """A command whose unknown options are answered with what to use instead.

    Options come from the environment too, and a variable that names none is as wrong.
    """

    def __init__(self, *args: Any, **how: Any):
        super().__init__(*args, **how)
        for parameter in self.params:
            parameter.envvar = _variable(self.name, parameter)
            parameter.show_envvar = False  # type: ignore[attr-defined] # they are all alike
        self.epilog = (
            f"All may come from the environment too: the last one here as {self.params[-1].envvar}."
        )

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from jaxinfer_service.cli import help_table

        help_table.use()
        super().format_help(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        self._check_environment(ctx)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            name = getattr(error, "option_name", "")
            close = getattr(error, "possibilities", None)
            if name in ADVICE:
                error.message, error.possibilities = f"{name}: {ADVICE[name]}", []  # type: ignore[attr-defined]
            elif name and close:
                nearest = difflib.get_close_matches(name, close, cutoff=0.75) or sorted(close)
                hint = f"No such option: {name}. Did you mean {' or '.join(nearest)}?"
                error.message, error.possibilities = hint, []  # type: ignore[attr-defined]
            raise

    def _check_environment(self, ctx: Any) -> None:
        begin = f"{ctx.auto_envvar_prefix}_"
        known = [str(parameter.envvar) for parameter in self.params]
        for name in os.environ:
            if name.startswith(begin) and name not in known:
                close = difflib.get_close_matches(name, known)
                hint = f"did you mean {close[0]}?" if close else "unset it"
                raise typer.BadParameter(f"the variable {name} names no option; {hint}")


def _variable(command: str | None, parameter: Any) -> str:
    """The name of an argument or option in the environment: as on the command line."""
    name = next((o for o in parameter.opts if o.startswith("--")), parameter.name).lstrip("-")
    return f"{VARIABLES}_{command}_{name}".upper().replace("-", "_")


_ENGINE, _LOG = "Engine", "Logging"

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="An Orbax folder, a Hugging Face folder, a .gguf file, or `demo` (SmolLM2-135M).",
        show_default=False,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        metavar="DTYPE",
        help="Weights and activations: float32, bfloat16 or float16; auto: as stored.",
        show_default="auto",
        rich_help_panel=_ENGINE,
    ),
]
LogLevel = Annotated[
    str, typer.Option(metavar="LEVEL", help="debug, info, warning or error.", rich_help_panel=_LOG)
]
LogFormat = Annotated[
    str,
    typer.Option(metavar="FORMAT", help="text or json, one line a record.", rich_help_panel=_LOG),
]

LogPrompts = Annotated[
    bool,
    typer.Option(
        "--log-prompts",
        help="Log what is asked, and put it into spans.",
        show_default="never",
        rich_help_panel=_LOG,
    ),
]
MaxLogLen = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Characters of each prompt that are logged.",
        show_default=str(LOGGED),
        rich_help_panel=_LOG,
    ),
]


def logged_characters(log_prompts: bool, max_log_len: int | None) -> int | None:
    """Characters of a prompt to log, None for none. Raises ValueError for a bound of nothing."""
    if not log_prompts:
        if max_log_len is not None:
            raise ValueError(
                "--max-log-len is given, and prompts are logged with --log-prompts only"
            )
        return None
    return LOGGED if max_log_len is None else max_log_len


def given(**options: Any) -> dict[str, Any]:
    """The options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def stored_dtype(dtype: str | None) -> str | None:
    """None for auto."""
    return None if dtype in (None, "auto") else dtype
