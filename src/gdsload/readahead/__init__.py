"""Reading before a load asks: prefetches."""
