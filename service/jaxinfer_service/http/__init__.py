"""The OpenAI-compatible front: a second door to the engine that the gRPC service serves."""
