"""The commands of the command line, which it imports by name."""

from PyInstaller.utils.hooks import collect_submodules

hiddenimports = collect_submodules("edgedec_apps.cli.commands")
