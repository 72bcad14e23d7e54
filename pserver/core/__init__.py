"""State machines and arithmetic. No gRPC, no sockets, no wall clock, no threads."""
