"""One server process: services that translate, hosts that wait and lock, wiring and lifecycle."""
