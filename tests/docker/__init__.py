"""The compose file in real containers; `make test-docker` runs it, pytest does not."""
