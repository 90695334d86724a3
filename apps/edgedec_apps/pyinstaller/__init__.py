"""Hooks for PyInstaller, found by entry point, so that frozen applications contain the plug-ins and llama.cpp."""

from pathlib import Path


def hook_dirs() -> list[str]:
    """Return the folders of the hooks."""
    return [str(Path(__file__).parent)]
