"""Remote results against the same torch optimizer run in this process."""
