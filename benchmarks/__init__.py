"""Benchmarks that judge themselves: see README.md beside this file."""
