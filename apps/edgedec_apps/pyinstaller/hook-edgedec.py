"""What `import edgedec` needs beside what PyInstaller sees: everything below it is imported by name."""

from PyInstaller.utils.hooks import collect_data_files, collect_dynamic_libs, collect_submodules, copy_metadata

hiddenimports = [
    name
    for package in ("edgedec", "edgedec_runtimes", "edgedec_models", "llama_cpp")
    for name in collect_submodules(package, filter=lambda name: not name.startswith("llama_cpp.server"))
]
datas = collect_data_files("edgedec_models") + copy_metadata("edgedec")
binaries = collect_dynamic_libs("llama_cpp") + collect_dynamic_libs("edgedec_runtimes")
