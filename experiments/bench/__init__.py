"""Benchmarks and checks that print the project's numbers: `python -m experiments.bench NAME`."""
