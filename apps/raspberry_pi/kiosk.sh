#!/usr/bin/env bash
# A screen that shows nothing but the chat: wait until the model is there, then open its page over the whole screen.
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

# A profile of its own: no questions at the start, and nothing of earlier conversations.
profile=$(mktemp -d)
trap 'rm -rf "$profile"' EXIT
"${BROWSER:-chromium}" --kiosk --no-first-run --noerrdialogs --user-data-dir="$profile" "$address"
