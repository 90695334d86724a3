"""Benchmarks: decoding with drafts and without in turn, and recordings of drafts."""
