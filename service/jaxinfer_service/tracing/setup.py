"""Where spans are sent, by what the operator and OpenTelemetry's own variables say.

https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables and
https://opentelemetry.io/docs/specs/otel/protocol/exporter
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from opentelemetry.trace import Tracer

from jaxinfer_service import version

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

logger = logging.getLogger(__name__)

OPTION = "--otlp-endpoint"
GRPC, HTTP = "grpc", "http/protobuf"
HTTP_PORT, HTTP_PATH = 4318, "/v1/traces"  # of OTLP
FLUSH_SECONDS = 5.0  # at the end, for spans that are still here
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_MISSING = "packages for tracing are not installed: pip install 'jaxinfer[tracing]'"


@dataclass(frozen=True, slots=True)
class Tracing:
    """Records spans and sends them, in a thread of its own."""

    provider: TracerProvider

    @property
    def tracer(self) -> Tracer:
        return self.provider.get_tracer("jaxinfer", version())

    async def close(self) -> None:
        """Send what is left; a collector that does not answer is not waited for."""
        thread = threading.Thread(target=self.provider.shutdown, daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, FLUSH_SECONDS)
        if thread.is_alive():
            logger.warning("the last spans could not be sent within %g s", FLUSH_SECONDS)


def open_tracing(endpoint: str | None) -> Tracing | None:
    """To `endpoint`, else to the one that the environment names; None: nobody asks for it.

    Raises ValueError for what cannot be honoured. Where only the environment asks and the packages
    are not there, that is logged: it may be meant for others.
    """
    variable = next((name for name in _ENDPOINTS if os.environ.get(name)), "")
    if _is_off(endpoint) or not (endpoint or variable):
        return None
    url = _url(endpoint or os.environ[variable], OPTION if endpoint else variable)
    protocol = _protocol(url)
    try:
        provider = _provider(_exporter(protocol, url if endpoint else None))
    except ImportError as error:
        if endpoint:
            raise ValueError(f"{OPTION}: {_MISSING}") from error
        logger.warning("%s is set, and %s", variable, _MISSING)
        return None
    logger.info("sending spans", extra={"collector": url.hostname, "protocol": protocol})
    return Tracing(provider)


def _is_off(endpoint: str | None) -> bool:
    """Whether the environment says that nothing is to be sent. The option wins where it can."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        if endpoint:
            raise ValueError(f"{OPTION} is given, and OTEL_SDK_DISABLED is true; unset one of them")
        return True
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "") or "otlp"
    return not endpoint and exporter != "otlp"


def _url(text: str, where: str) -> SplitResult:
    try:
        url = urlsplit(text)
        good = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        good = False
    if not good:
        raise ValueError(
            f"{where} is {text!r}; it must be a URL such as http://localhost:4317, or https://… for"
            " TLS"
        )
    return url


def _protocol(url: SplitResult) -> str:
    """What the environment says, else what the port and the path are usual for."""
    for name in _PROTOCOLS:
        if said := os.environ.get(name):
            if said not in (GRPC, HTTP):
                raise ValueError(f"{name} is {said!r}; spans are sent by {GRPC} or {HTTP}")
            return said
    return HTTP if url.port == HTTP_PORT or url.path.strip("/") else GRPC


def _exporter(protocol: str, url: SplitResult | None) -> Any:
    """`url` None: as the environment says."""
    if protocol == GRPC:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint=None if url is None else url.geturl())
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp

    if url is not None and not url.path.strip("/"):
        url = url._replace(path=HTTP_PATH)
    return OverHttp(endpoint=None if url is None else url.geturl())


def _provider(exporter: Any) -> TracerProvider:
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    ours = {
        "service.name": "jaxinfer",
        "service.version": version(),
        "service.instance.id": str(uuid.uuid4()),
    }
    resource = Resource.create(ours).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider
