"""Hooks that PyInstaller finds by entry point, so that frozen applications hold our plug-ins and llama.cpp."""

from pathlib import Path


def hook_dirs() -> list[str]:
    """Return the folders of our hooks."""
    return [str(Path(__file__).parent)]
