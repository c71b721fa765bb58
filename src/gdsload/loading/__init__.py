"""One load: plan the reads, post them, check them, hand out tensors, write the report."""
