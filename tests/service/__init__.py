"""Real gRPC on 127.0.0.1, with servers and trainers in one process."""
