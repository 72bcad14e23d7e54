"""Every test of this package."""
