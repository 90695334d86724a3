#!/usr/bin/env bash
# Build a one-folder application with PyInstaller from a small script that embeds edgedec, and run it.
# usage: frozen_app.sh FOLDER   (needs edgedec and pyinstaller in the current environment, and smollm2-135m)
set -euo pipefail
folder=$1
mkdir -p "$folder"
cat >"$folder/small_app.py" <<'PY'
import sys

import edgedec

with edgedec.load(sys.argv[1], n_ctx=256, offline=True) as model:
    print(model.chat([{"role": "user", "content": "Say hello."}], max_tokens=8, temperature=0).text)
PY
cd "$folder"
pyinstaller --log-level ERROR --noconfirm --onedir small_app.py
./dist/small_app/small_app smollm2-135m | grep -q .
echo "the frozen application answers ($(du -sm dist/small_app | cut -f1) MB)"
