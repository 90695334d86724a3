#!/usr/bin/env bash
# Fetch a wheel's dependencies as wheels for the same kind of processor and the Python of make_root.sh's roots.
#
#   bash tests/packaging/fetch.sh WHEEL FOLDER [EXTRA...]    copies WHEEL into FOLDER, too
#
# Needs the package index, and pip of build.sh's tools beside WHEEL, or any other.
set -euo pipefail
wheel=$1 folder=$2
shift 2
extras=${*:+$(printf ',%s' "$@")}
[[ $(basename "$wheel") =~ (manylinux_[0-9]+_[0-9]+)_([a-z0-9_]+)\.whl$ ]] ||
  { echo "$wheel is no manylinux wheel; tests/packaging/build.sh makes one" >&2; exit 1; }
kind=${BASH_REMATCH[2]}
# pip takes a platform by its name, not every older one with it.
platforms=$(printf -- "--platform=%s_$kind " "${BASH_REMATCH[1]}" manylinux2014 manylinux_2_{17,26,27,28,31,34})
python=$(dirname "$wheel")/tools/bin/python
[ -x "$python" ] || python=python3
# shellcheck disable=SC2086
"$python" -m pip download -q --disable-pip-version-check $platforms --python-version 3.11 --only-binary=:all: \
  --dest "$folder" "$wheel${extras:+[${extras#,}]}"
