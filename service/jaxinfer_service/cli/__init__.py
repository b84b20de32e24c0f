"""The `jaxinfer` command.

Each command's module imports what it needs when it runs, so that help is instant and only commands
that compute import JAX.
"""

from __future__ import annotations

import os
from typing import Any

import typer
from typer.core import TyperGroup

from jaxinfer_service import version
from jaxinfer_service.cli import options
from jaxinfer_service.cli.chat import chat
from jaxinfer_service.cli.checkpoint import convert, inspect
from jaxinfer_service.cli.evaluate import evaluate
from jaxinfer_service.cli.generate import generate
from jaxinfer_service.cli.keys import make_key
from jaxinfer_service.cli.options import Command
from jaxinfer_service.cli.plan import plan
from jaxinfer_service.cli.quantize import quantize
from jaxinfer_service.cli.run_batch import run_batch
from jaxinfer_service.cli.serve import serve
from jaxinfer_service.cli.top import top

app = typer.Typer(
    name="jaxinfer",
    help="Serve language models with JAX.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "auto_envvar_prefix": options.VARIABLES,  # --max-model-len of serve: JAXINFER_SERVE_...
    },
)

_RUN, _WATCH, _CHECKPOINTS, _MEASURE = "Run a model", "Watch", "Checkpoints", "Measure"

app.command(rich_help_panel=_RUN, cls=Command)(serve)
app.command(rich_help_panel=_RUN, cls=Command)(generate)
app.command(rich_help_panel=_RUN, cls=Command)(chat)
app.command(rich_help_panel=_RUN, cls=Command)(run_batch)
app.command(rich_help_panel=_RUN, cls=Command)(make_key)
app.command(rich_help_panel=_WATCH, cls=Command)(top)
app.command(rich_help_panel=_CHECKPOINTS, cls=Command)(convert)
app.command(rich_help_panel=_CHECKPOINTS, cls=Command)(inspect)
app.command(rich_help_panel=_CHECKPOINTS, cls=Command)(quantize)
app.command(rich_help_panel=_MEASURE, cls=Command)(plan)
app.command("eval", rich_help_panel=_MEASURE, cls=Command)(evaluate)


class _BenchGroup(TyperGroup):
    """The benchmarks, imported when one of them is asked for."""

    def _real(self) -> Any:
        # They add themselves to the group.
        from jaxinfer.bench.cli import app as bench
        from jaxinfer_service.bench import beside, front, mock_server, serve, soak  # noqa: F401
        from jaxinfer_service.cli import help_table

        help_table.use()
        return typer.main.get_command(bench)

    def list_commands(self, ctx: Any) -> list[str]:
        return self._real().list_commands(ctx)

    def get_command(self, ctx: Any, name: str) -> Any:
        return self._real().get_command(ctx, name)


app.add_typer(
    typer.Typer(cls=_BenchGroup, no_args_is_help=True),
    name="bench",
    help="Measure throughput, latency, steps, and a running server.",
    rich_help_panel=_MEASURE,
)


@app.callback(invoke_without_command=True)
def _root(
    show_version: bool = typer.Option(False, "--version", help="Print the version and leave."),
) -> None:
    if show_version:
        found = version()
        typer.echo(
            f"jaxinfer{f' {found}' if found else ', run from a folder that is not installed'}"
        )
        raise typer.Exit


def main() -> None:
    """Run the command that the arguments name; `command.main` minds signals around it."""
    # gRPC's own remarks, on connections of others too, are no lines of our log; what matters is
    # raised. Read when grpc is first imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    app(prog_name="jaxinfer")
