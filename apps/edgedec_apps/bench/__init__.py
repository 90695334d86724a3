"""Benchmarks: decoding with drafts and without in turn, recordings of drafts, and their replay for other devices."""
