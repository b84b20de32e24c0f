"""The server's certificate, for both of its ports. It can be read again while they serve."""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Tls:
    """Files in PEM. With a `client_ca`, clients must show a certificate that it signed.

    Raises ValueError when made of files that are not what they should be.
    """

    cert: Path
    key: Path
    client_ca: Path | None = None
    _context: ssl.SSLContext = field(init=False, repr=False, compare=False)
    _for_grpc: Any = field(init=False, repr=False, compare=False)  # until gRPC has asked for it

    def __post_init__(self) -> None:
        self._read()

    def _read(self) -> None:
        """What the files hold now, for connections from now on."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as error:
            raise ValueError(
                f"--tls-cert {self.cert} and --tls-key {self.key} are no certificate with its key:"
                f" {error}"
            ) from error
        ca = None
        if self.client_ca is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            try:
                context.load_verify_locations(self.client_ca)
                ca = self.client_ca.read_bytes()
            except (OSError, ssl.SSLError) as error:
                raise ValueError(
                    f"--tls-client-ca {self.client_ca} has no certificates: {error}"
                ) from error
        pair = (self.key.read_bytes(), self.cert.read_bytes())
        self._for_grpc = grpc.ssl_server_certificate_configuration([pair], ca)
        self._context = context

    def reload(self) -> None:
        """Read the files again. Bad ones are logged, and the certificate stays as it was."""
        try:
            self._read()
            logger.info("read the certificate again", extra={"cert": str(self.cert)})
        except (OSError, ValueError) as error:
            logger.error("the certificate stays as it was: %s", error)

    def credentials(self) -> grpc.ServerCredentials:
        """For gRPC, which asks at every handshake whether there is something new."""
        first, self._for_grpc = self._for_grpc, None

        def fresh() -> Any:
            new, self._for_grpc = self._for_grpc, None
            return new

        return grpc.dynamic_ssl_server_credentials(first, fresh, self.client_ca is not None)

    def for_http(self) -> dict[str, Any]:
        """For the HTTP server."""
        options: dict[str, Any] = {"ssl_certfile": str(self.cert), "ssl_keyfile": str(self.key)}
        if self.client_ca is not None:
            options |= {"ssl_ca_certs": str(self.client_ca), "ssl_cert_reqs": ssl.CERT_REQUIRED}
        return options

    def keep_fresh(self, context: ssl.SSLContext) -> None:
        """Have the connections of this context take what was read last."""

        def choose(connection: Any, name: str | None, first: ssl.SSLContext) -> None:
            connection.context = self._context

        context.sni_callback = choose
