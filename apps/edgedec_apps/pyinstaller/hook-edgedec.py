"""What `import edgedec` needs beside what PyInstaller sees: everything below it is imported by name."""

from importlib.util import find_spec

from PyInstaller.utils.hooks import collect_data_files, collect_dynamic_libs, collect_submodules, copy_metadata

_llama_cpp = ("llama_cpp",) if find_spec("llama_cpp") else ()  # the extra [llamacpp]
hiddenimports = [
    name
    for package in ("edgedec", "edgedec_runtimes", "edgedec_models", *_llama_cpp)
    for name in collect_submodules(package, filter=lambda name: not name.startswith("llama_cpp.server"))
]
datas = collect_data_files("edgedec_models") + copy_metadata("edgedec")
binaries = [lib for package in ("edgedec_runtimes", *_llama_cpp) for lib in collect_dynamic_libs(package)]
