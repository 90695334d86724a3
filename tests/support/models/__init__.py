"""Models for tests: real ones, tiny random ones, and what writes their files."""
