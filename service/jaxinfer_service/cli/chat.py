"""`jaxinfer chat`: a conversation with a running server."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxinfer.option_groups import takes_groups
from jaxinfer_service.cli import console, sampling_options
from jaxinfer_service.cli.remote import RemoteOptions, require_serving, said

if TYPE_CHECKING:
    from jaxinfer_service.client import Client

_HELP = "/reset forgets the conversation, /quit or Ctrl-D leaves, Ctrl-C stops an answer."


@takes_groups
def chat(
    remote: RemoteOptions,
    model: Annotated[
        str, typer.Option(help="Its model's name.", show_default="whichever it serves")
    ] = "",
    system: Annotated[
        str | None, typer.Option(help="A system message to begin with.", show_default=False)
    ] = None,
    priority: sampling_options.Priority = 0,
    tenant: sampling_options.Tenant = "",
    *,
    sampling: sampling_options.SamplingOptions,
) -> None:
    """Chat with a server; answers stream. Works piped too: each line of input is a message."""
    params = sampling.params() | {"priority": priority, "tenant": tenant}
    with remote.client() as client:
        require_serving(client)
        if "temperature" not in params and not _may_have_temperature(client):
            params["temperature"] = 0.7
        conversation = Conversation(client, model, system, params)
        interactive = sys.stdin.isatty()
        if interactive:
            typer.echo(_HELP, err=True)
        for line in _lines(interactive):
            if line == "/quit":
                return
            if line == "/reset":
                conversation.reset()
            elif line.startswith("/"):
                typer.echo(f"{line.split()[0]} is no command. {_HELP}", err=True)
            elif line and not conversation.ask(line) and not interactive:
                raise typer.Exit(1)


def _may_have_temperature(client: Client) -> bool:
    """Whether the served model says by itself how its tokens are drawn, or the server does not
    tell: it does so to administrators alone."""
    import grpc

    from jaxinfer_service.pb.jaxinfer.v1 import control_pb2

    try:
        info = client.control.ServerInfo(control_pb2.ServerInfoRequest())
    except grpc.RpcError:
        return True
    return info.generation.HasField("temperature")


def _lines(interactive: bool) -> Iterator[str]:
    """What the user says, line by line."""
    if not interactive:
        yield from (console.decoded(line).strip() for line in sys.stdin.buffer)
        return
    import readline  # noqa: F401 -- gives input() editing and history

    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")  # whatever the locale says
    while True:
        try:
            yield input("> ").strip()
        except KeyboardInterrupt:
            typer.echo("\n" + _HELP, err=True)
        except UnicodeDecodeError as error:
            typer.echo(f"jaxinfer: {console.not_utf8(error)}", err=True)
        except EOFError:
            typer.echo()
            return


class Conversation:
    """The messages so far, and how to get the next one."""

    def __init__(self, client: Client, model: str, system: str | None, sampling: dict[str, Any]):
        self._client = client
        self._model = model
        self._start = [{"role": "system", "content": system}] if system is not None else []
        self._sampling = sampling
        self.messages = list(self._start)

    def reset(self) -> None:
        self.messages = list(self._start)

    def ask(self, text: str) -> bool:
        """Stream the answer to stdout. False after an error, which leaves no trace in messages."""
        import grpc

        messages = [*self.messages, {"role": "user", "content": text}]
        call: Any = self._client.stream(messages, model=self._model, **self._sampling)
        answer = ""
        try:
            for chunk in call:
                answer += chunk.text
                typer.echo(chunk.text, nl=False)
                sys.stdout.flush()
        except KeyboardInterrupt:
            call.cancel()
        except grpc.RpcError as error:
            begun = "\n" if answer else ""  # the error gets a line of its own
            typer.echo(f"{begun}jaxinfer: {said(error)}", err=True)
            return False
        typer.echo()
        self.messages = [*messages, {"role": "assistant", "content": answer}]
        return True
