"""The server's certificate, for both of its ports."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM. With a `client_ca`, clients must show a certificate that it signed.

    Raises ValueError when made of files that are not what they should be.
    """

    cert: Path
    key: Path
    client_ca: Path | None = None

    def __post_init__(self) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as error:
            raise ValueError(
                f"--tls-cert {self.cert} and --tls-key {self.key} are no certificate with its key:"
                f" {error}"
            ) from error
        if self.client_ca is not None:
            try:
                context.load_verify_locations(self.client_ca)
            except (OSError, ssl.SSLError) as error:
                raise ValueError(
                    f"--tls-client-ca {self.client_ca} has no certificates: {error}"
                ) from error

    def credentials(self) -> grpc.ServerCredentials:
        """For gRPC."""
        ca = self.client_ca.read_bytes() if self.client_ca else None
        pair = (self.key.read_bytes(), self.cert.read_bytes())
        return grpc.ssl_server_credentials([pair], ca, require_client_auth=ca is not None)

    def for_http(self) -> dict[str, Any]:
        """For the HTTP server."""
        options: dict[str, Any] = {"ssl_certfile": str(self.cert), "ssl_keyfile": str(self.key)}
        if self.client_ca is not None:
            options |= {"ssl_ca_certs": str(self.client_ca), "ssl_cert_reqs": ssl.CERT_REQUIRED}
        return options
