"""Drafters: what proposes tokens for the target to check. One method a file, each found by entry point."""
