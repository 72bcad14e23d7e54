"""Settings of every unit test."""

from hypothesis import settings

# A busy machine makes single examples slow; pytest's own timeout still ends what hangs.
settings.register_profile("unit", deadline=None, max_examples=50)
settings.load_profile("unit")
