"""Entry points of other libraries that gdsload replaces or extends."""
