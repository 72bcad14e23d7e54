"""Training while processes are killed, stopped, restarted and cut off; see __main__.py."""
