"""Benchmarks: ours beside the peers, each in a process of its own, in one run."""
