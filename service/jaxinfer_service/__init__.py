"""The `jaxinfer` command and the gRPC server."""

from __future__ import annotations


def version() -> str:
    """Of jaxinfer; "" when it runs from a folder that is not installed."""
    from importlib import metadata

    try:
        return metadata.version("jaxinfer")
    except metadata.PackageNotFoundError:
        return ""
