"""The `pserver` command: `serve`, `launch` and `status`."""
