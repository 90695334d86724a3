#!/usr/bin/env bash
# A screen that shows only the chat: wait until the model is loaded, then open the chat in full screen.
# usage: kiosk.sh [ADDRESS]   (BROWSER names another browser than chromium, WAIT_S how long to wait for the model)
set -euo pipefail
address=${1:-http://127.0.0.1:8080}
seconds=${WAIT_S:-300}

printf 'waiting for %s ' "$address"
until curl --silent --fail --max-time 2 --output /dev/null "$address/health"; do
  if ((SECONDS >= seconds)); then
    printf '\nno model after %s s; see: journalctl -u edgedec\n' "$seconds" >&2
    exit 1
  fi
  printf .
  sleep 1
done
echo ' there'

# A new browser profile: no questions at the start, and no data of earlier conversations.
profile=$(mktemp -d)
trap 'rm -rf "$profile"' EXIT
"${BROWSER:-chromium}" --kiosk --no-first-run --noerrdialogs --user-data-dir="$profile" "$address"
