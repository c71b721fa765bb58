"""Reading before a load asks: prefetches, and the initialisation of a GPU."""
