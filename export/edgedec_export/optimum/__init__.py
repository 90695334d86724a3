"""Exports by way of optimum, which runs in an environment of its own."""
