"""`jaxinfer make-key`."""

from __future__ import annotations

from typing import Annotated

import typer

from jaxinfer_service.cli import console


def make_key(
    name: Annotated[str, typer.Argument(help="Whose it is; logs and refusals say it.")],
    role: Annotated[
        str, typer.Option(metavar="ROLE", help="inference, or admin, which may do all.")
    ] = "inference",
    tenant: Annotated[str, typer.Option(help="Its requests are this tenant's.")] = "",
    max_concurrent: Annotated[
        int | None, typer.Option(help="Calls at a time.", show_default="no limit")
    ] = None,
    requests_per_minute: Annotated[
        int | None, typer.Option(help="Calls a minute.", show_default="no limit")
    ] = None,
) -> None:
    """Make an API key: the entry for --api-keys to stdout, the key itself to stderr, once."""
    import yaml

    from jaxinfer_service.access import make_entry

    try:
        key, entry = make_entry(
            name,
            role,
            tenant,
            max_concurrent=max_concurrent,
            requests_per_minute=requests_per_minute,
        )
    except ValueError as error:
        console.fail(error)
    shown = entry.model_dump(exclude_defaults=True) | {"roles": list(entry.roles)}
    typer.echo(yaml.safe_dump({"keys": [shown]}, sort_keys=False), nl=False)
    typer.echo(f"the key, which is stored nowhere: {key}", err=True)
