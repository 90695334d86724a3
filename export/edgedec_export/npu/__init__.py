"""Graphs for NPUs: fixed shapes and whole numbers."""
