"""Trained draft heads for tests: tiny ones, damaged ones, and oracles of their forward."""
