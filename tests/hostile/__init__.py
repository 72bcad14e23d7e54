"""Bad input: clear errors, flat memory, a live server, and nothing lost of those who behave."""
