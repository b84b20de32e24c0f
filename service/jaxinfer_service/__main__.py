"""`python -m jaxinfer_service` is the `jaxinfer` command."""

from jaxinfer_service.command import main

main()
