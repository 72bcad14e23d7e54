"""Exits with 0 if the server at the address in the first argument says SERVING on gRPC's standard health service."""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 3.0
# A proxy in the environment of a container is none for its neighbours.
OPTIONS = (("grpc.enable_http_proxy", 0),)


def main() -> str | None:
    """Asks once; returns what is wrong, or None."""
    (address,) = sys.argv[1:]
    try:
        with grpc.insecure_channel(address, options=OPTIONS) as channel:
            reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    except grpc.RpcError as error:
        return f"{address}: {error.code().name}: {error.details()}"
    if reply.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    return f"{address}: {health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)}"


if __name__ == "__main__":
    sys.exit(main())
