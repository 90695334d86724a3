"""The reference runtime: a small numpy transformer, the oracle of the tests."""
