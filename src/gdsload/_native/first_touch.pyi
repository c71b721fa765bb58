MODES: dict[str, int]
