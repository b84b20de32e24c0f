"""Spans of calls and requests, sent to an OpenTelemetry collector."""
