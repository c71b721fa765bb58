"""transformers: `from_pretrained` whose weights are read by gdsload."""
