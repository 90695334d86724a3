"""Graphs for NPUs: static shapes and integers."""
