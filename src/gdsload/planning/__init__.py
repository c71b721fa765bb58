"""Plans which bytes are read, in which order, and to where. Opens no files, allocates no memory."""
