"""Which bytes are read, in which order, and to where. Pure arithmetic: no files, no memory."""
