"""The only package that knows gRPC and the generated code: channels, servers, deadlines, retry, error <-> status."""

from pserver.config import without_grpc_fork_handlers

# Here, because every import of grpc in this package comes after.
without_grpc_fork_handlers()
