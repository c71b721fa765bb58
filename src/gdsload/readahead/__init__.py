"""Reading before a load asks: prefetches, and the claims that loads make on them."""
