"""Options of the server itself: where it listens, whom it lets in, what it tells."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jaxinfer_service.cli import options

if TYPE_CHECKING:
    from jaxinfer_service.server import ServerConfig
    from jaxinfer_service.tls import Tls

SERVER = "Server"
HTTP_PORT, METRICS_PREFIX = 8000, "jaxinfer"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """A server, whatever it serves."""

    host: Annotated[
        str,
        typer.Option(metavar="ADDRESS", help="Address to listen on.", rich_help_panel=SERVER),
    ] = "127.0.0.1"
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, metavar="N", help="0: a free one.", rich_help_panel=SERVER),
    ] = 50051
    http_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            metavar="N",
            help="Of the OpenAI-compatible HTTP API; 0: a free one.",
            show_default=str(HTTP_PORT),
            rich_help_panel=SERVER,
        ),
    ] = None
    http: Annotated[
        bool, typer.Option("--http/--no-http", help="Serve HTTP too.", rich_help_panel=SERVER)
    ] = True
    api_keys: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Callers need one of its keys; see make-key. Read again on SIGHUP.",
            rich_help_panel=SERVER,
        ),
    ] = None
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Certificate, PEM. Read again on SIGHUP, as are the files with it.",
            rich_help_panel=SERVER,
        ),
    ] = None
    tls_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Its key, PEM.", rich_help_panel=SERVER)
    ] = None
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Clients need a certificate that it signed.",
            rich_help_panel=SERVER,
        ),
    ] = None
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Pages of it may call over HTTP (CORS); repeatable, * for all.",
            show_default="none",
            rich_help_panel=SERVER,
        ),
    ] = None
    metrics_prefix: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="How the names of /metrics begin; vllm for dashboards made for it.",
            show_default=METRICS_PREFIX,
            rich_help_panel=SERVER,
        ),
    ] = None
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            "--otlp-endpoint",
            "--otlp-traces-endpoint",
            metavar="URL",
            help="Send spans of requests there (OpenTelemetry), e.g. http://localhost:4317.",
            show_default="the environment's, if any",
            rich_help_panel=SERVER,
        ),
    ] = None
    drain_timeout: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="For running requests after SIGTERM.",
            rich_help_panel=SERVER,
        ),
    ] = 30.0
    stall_timeout: Annotated[
        float,
        typer.Option(
            min=1,
            metavar="SECONDS",
            help="Without a step: count as a stall.",
            rich_help_panel=SERVER,
        ),
    ] = 60.0
    log_prompts: options.LogPrompts = False
    max_log_len: options.MaxLogLen = None

    def config(self) -> ServerConfig:
        """Raises ValueError naming what contradicts itself, and OSError for files."""
        from jaxinfer_service.access import Access
        from jaxinfer_service.http.origins import read_origins
        from jaxinfer_service.server import ServerConfig
        from jaxinfer_service.tracing.setup import open_tracing

        try:
            access = Access(self.api_keys)
        except OSError as error:
            said = error.strerror or error
            raise ValueError(f"--api-keys {self.api_keys} cannot be read: {said}") from error
        return ServerConfig(
            host=self.host,
            port=self.port,
            http_port=self._http_port(),
            metrics_prefix=(METRICS_PREFIX if self.metrics_prefix is None else self.metrics_prefix),
            access=access,
            tls=self._tls(),
            allowed_origins=read_origins(self.allowed_origins or ()),
            tracing=open_tracing(self.otlp_endpoint),
            log_prompts=options.logged_characters(self.log_prompts, self.max_log_len),
            drain_timeout=self.drain_timeout,
            stall_limit=self.stall_timeout,
        )

    def _http_port(self) -> int | None:
        if not self.http:
            for name in ("http_port", "allowed_origins", "metrics_prefix"):
                if getattr(self, name) is not None:
                    option = "--" + name.replace("_", "-")
                    raise ValueError(f"--no-http is given, and {option}, which is of HTTP")
            return None
        port = HTTP_PORT if self.http_port is None else self.http_port
        if port and port == self.port:
            raise ValueError(f"gRPC and HTTP cannot both have port {port}; choose another of them")
        return port

    def _tls(self) -> Tls | None:
        from jaxinfer_service.tls import Tls

        cert, key, client_ca = self.tls_cert, self.tls_key, self.tls_client_ca
        if cert is None and key is None and client_ca is None:
            return None
        if cert is None or key is None:
            raise ValueError("TLS needs both --tls-cert and --tls-key")
        return Tls(cert, key, client_ca)
