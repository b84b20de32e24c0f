"""Collectors of spans, as OpenTelemetry's protocol has them, over gRPC and over HTTP."""

from __future__ import annotations

import contextlib
import http.server
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service


class Collector(service.TraceServiceServicer):
    """What it was sent: requests, with the headers they came with."""

    def __init__(self):
        self.requests, self.headers, self.paths = [], [], []

    def take(self, request: pb.ExportTraceServiceRequest, headers, path: str):
        self.requests.append(request)
        self.headers.append({name.lower(): value for name, value in headers})
        self.paths.append(path)
        return pb.ExportTraceServiceResponse()

    def Export(self, request, context):
        return self.take(request, context.invocation_metadata(), "grpc")

    @property
    def spans(self) -> list:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def resource(self) -> dict:
        return attributes(self.requests[0].resource_spans[0].resource)


def attributes(message) -> dict:
    """The attributes of a span, an event or a resource."""
    return {each.key: _value(each.value) for each in message.attributes}


def _value(value):
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)


@contextlib.contextmanager
def collecting():
    """(collector, its address) over gRPC."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(1))
    service.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@contextlib.contextmanager
def collecting_over_http(path: str = "/v1/traces"):
    """(collector, its address, with this path) over HTTP."""
    collector = Collector()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            request = pb.ExportTraceServiceRequest.FromString(body)
            answer = collector.take(request, self.headers.items(), self.path).SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield collector, f"http://127.0.0.1:{server.server_port}{path}"
        finally:
            server.shutdown()
            thread.join()
