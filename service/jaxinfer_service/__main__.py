"""`python -m jaxinfer_service` is the `jaxinfer` command."""

from jaxinfer_service.cli import main

main()
