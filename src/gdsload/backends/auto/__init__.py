"""The `auto` backend: measures backends, chooses one, and fails over to another."""
