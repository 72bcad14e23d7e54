"""Figures of pserver and its peers, measured side by side in one run: `python -m benchmarks --list`."""
