#!/usr/bin/env bash
# Build a one-folder application with PyInstaller, of the desktop example where PySide6 is installed, else of a small
# script that embeds edgedec, and have it answer.
# usage: frozen_app.sh FOLDER   (needs edgedec and pyinstaller in the current environment, and smollm2-135m)
set -euo pipefail
folder=$1
desktop=$(cd "$(dirname "$0")/../../apps/desktop" && pwd)
mkdir -p "$folder"
cd "$folder"
if python -c 'from importlib.util import find_spec as f; raise SystemExit(f("PySide6") is not None)'; then
  cat >small_app.py <<'PY'
import sys

import edgedec

with edgedec.load(sys.argv[1], n_ctx=256, offline=True) as model:
    print(model.chat([{"role": "user", "content": "Say hello."}], max_tokens=8, temperature=0).text)
PY
  pyinstaller --log-level ERROR --noconfirm --onedir small_app.py
  ./dist/small_app/small_app smollm2-135m | grep -q .
  echo "the frozen application answers ($(du -sm dist/small_app | cut -f1) MB)"
  exit
fi
cat >desktop_app.py <<'PY'
import sys

import main
from PySide6.QtCore import QTimer
from PySide6.QtWidgets import QApplication

app = QApplication(sys.argv[:1])
window = main.Window([sys.argv[1]] * 2, "", True)
pane = window.panes[0]
orders = iter((pane.load_button.click, lambda: pane.prompt.setText("Say hello."), pane.prompt.returnPressed.emit))


def go_on():
    if not pane.stop_button.isEnabled():
        next(orders, app.quit)()


timer = QTimer(interval=50)
timer.timeout.connect(go_on)
timer.start()
window.show()
app.exec()
window.close()
for each in window.panes:
    each.worker_thread.wait()
print(pane.messages[1]["content"])
PY
pyinstaller --log-level ERROR --noconfirm --onedir --paths "$desktop" desktop_app.py
QT_QPA_PLATFORM=offscreen timeout 300 ./dist/desktop_app/desktop_app smollm2-135m | grep -q .
echo "the frozen desktop example answers ($(du -sm dist/desktop_app | cut -f1) MB)"
