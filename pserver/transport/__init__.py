"""The only package that knows gRPC and the generated code: channels, servers, deadlines, retry, error <-> status."""
