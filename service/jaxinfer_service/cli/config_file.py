"""`--config file.yaml`: options of a command, written down. The command line wins over the file."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxinfer_service.cli.foreign import ADVICE


def read(ctx: typer.Context, path: Path | None) -> Path | None:
    """Make the file's values the command's defaults. Raises typer.BadParameter naming bad keys."""
    if path is None:
        return None
    from jaxinfer_service.yaml_text import load_yaml

    try:
        data = load_yaml(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise typer.BadParameter(f"{path} must hold options, such as `max-model-len: 8k`")
    names = _options(ctx)
    defaults = {}
    for key, value in data.items():
        option = "--" + str(key).replace("_", "-")
        if option not in names:
            raise typer.BadParameter(f"{path}: {key}: {_hint(option, names)}")
        parameter = names[option]
        if option in parameter.secondary_opts:  # `no-overlap: true` is `overlap: false`
            if not isinstance(value, bool):
                raise typer.BadParameter(f"{path}: {key} is {value!r}; it is true or false")
            value = not value
        elif isinstance(value, bool) and not parameter.is_flag:
            raise typer.BadParameter(f"{path}: {key} is {value!r}; give it a value")
        several = parameter.multiple and not isinstance(value, list)
        defaults[str(parameter.name)] = [value] if several else value
    ctx.default_map = {**(ctx.default_map or {}), **defaults}
    return path


def _options(ctx: typer.Context) -> dict[str, Any]:
    """Option → parameter of the command, but for those that make no sense in a file."""
    return {
        option: parameter
        for parameter in ctx.command.params
        if parameter.param_type_name == "option" and parameter.name not in ("config_file", "help")
        for option in (*parameter.opts, *parameter.secondary_opts)
    }


def _hint(option: str, names: dict[str, Any]) -> str:
    if option in ADVICE:
        return ADVICE[option]
    close = difflib.get_close_matches(option, names)
    return f"no such option; did you mean {close[0].lstrip('-')}?" if close else "no such option"


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        callback=read,
        is_eager=True,
        help="YAML with these options, e.g. `max-model-len: 8k`; the command line wins.",
        show_default=False,
    ),
]
