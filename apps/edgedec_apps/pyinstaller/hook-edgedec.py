"""The modules and data that edgedec imports by name, which PyInstaller does not see."""

from importlib.util import find_spec

from PyInstaller.utils.hooks import collect_data_files, collect_dynamic_libs, collect_submodules, copy_metadata

from edgedec.plugins import DISTRIBUTION

_llama_cpp = ("llama_cpp",) if find_spec("llama_cpp") else ()  # the extra [llamacpp]
_packages = ("edgedec", "edgedec_runtimes", "edgedec_models", "edgedec_methods", "edgedec_apps.server", *_llama_cpp)
hiddenimports = [
    name
    for package in _packages
    for name in collect_submodules(package, filter=lambda name: not name.startswith("llama_cpp.server"))
]
datas = (
    collect_data_files("edgedec")
    + collect_data_files("edgedec_models")
    + collect_data_files("edgedec_runtimes", includes=["cpu/native/**/*.h"])  # which ctypes reads
    + collect_data_files("edgedec_apps")
    + copy_metadata(DISTRIBUTION)
)
binaries = [lib for package in ("edgedec_runtimes", *_llama_cpp) for lib in collect_dynamic_libs(package)]
