"""What the commands that ask a running server share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from jaxinfer_service.cli import console

if TYPE_CHECKING:
    from jaxinfer_service.client import Client

Server = Annotated[str, typer.Option(metavar="HOST:PORT", help="The server.")]
LOCAL = "localhost:50051"


def client_of(server: str) -> Client:
    """A client of the server. Raises typer.BadParameter for what is no address."""
    from jaxinfer_service.client import Client

    try:
        return Client(server)
    except ValueError as error:
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
