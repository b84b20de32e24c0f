"""Benchmarks of the service: load on a running server, and what a server adds to its engine."""
