"""Fetching a file over HTTP: resumed, locked, verified; its header alone, or ranges of it."""
