"""What the commands that ask a running server share."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from jaxinfer_service.cli import console

if TYPE_CHECKING:
    from jaxinfer_service.client import Client

LOCAL = "localhost:50051"
_PANEL = "Server"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteOptions:
    """Which server, and how it is reached. The API key is in the environment alone."""

    server: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="The server; tls://HOST:PORT if it has TLS.",
            show_default=LOCAL,
            rich_help_panel=_PANEL,
        ),
    ] = None
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Certificates to trust, PEM, instead of the system's.",
            rich_help_panel=_PANEL,
        ),
    ] = None
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A certificate to show, PEM, if it asks for one.",
            rich_help_panel=_PANEL,
        ),
    ] = None
    tls_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Its key, PEM.", rich_help_panel=_PANEL)
    ] = None

    @property
    def given(self) -> bool:
        """Whether any of them was."""
        return any(value is not None for value in dataclasses.astuple(self))

    def client(self) -> Client:
        """Raises typer.BadParameter for what is no address, or no file."""
        from jaxinfer_service.client import Client

        files = {"ca": self.tls_ca, "cert": self.tls_cert, "key": self.tls_key}
        try:
            return Client(self.server or LOCAL, **files)
        except (ValueError, OSError) as error:
            raise typer.BadParameter(f"--server: {error}") from error


def require_serving(client: Client) -> None:
    """End the command with one line unless the server answers and serves."""
    import grpc

    try:
        if client.is_serving(5.0):
            return
        console.fail(f"{client.target} is not serving yet, or not any more; its log says why")
    except grpc.RpcError as error:
        no_answer(client, error)


def no_answer(client: Client, error: Any) -> NoReturn:
    """End the command: there is no server."""
    hint = "start one with: jaxinfer serve demo"
    if re.search("handshake|verification", error.details()):
        hint = "see --tls-ca, --tls-cert and --tls-key"
    console.fail(f"no server answers at {client.target} ({said(error)}); {hint}")


def nothing_to_show(client: Client, error: Any) -> NoReturn:
    """End the command: the server, if there is one, does not answer this call."""
    import grpc

    try:
        client.is_serving(5.0)
    except grpc.RpcError:
        no_answer(client, error)
    console.fail(f"{client.target} has nothing to show ({said(error)})")


def gone(client: Client, error: Any) -> NoReturn:
    """End the command: the server answers no more."""
    console.fail(f"{client.target} answers no more ({said(error)})")


def said(error: Any) -> str:
    """What a grpc.RpcError says."""
    return f"{error.code().name}: {error.details()}"
