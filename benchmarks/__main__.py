"""`python -m benchmarks`; see command.py. Every child process imports this file too, and needs nothing of it."""

if __name__ == "__main__":
    from benchmarks.command import app

    app()
