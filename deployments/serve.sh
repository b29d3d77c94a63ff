#!/usr/bin/env bash
# `make serve`: a Prefect server, the deployments, the automation and a worker on this machine. Ctrl-C ends all.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$(cd "${BIN:-.venv/bin}" && pwd)
port=${PORT:-4200}
export PATH="$bin:$PATH" CLASSIFY_TICKETS_ROOT="$PWD" PREFECT_API_URL="http://127.0.0.1:$port/api"
export PREFECT_FLOWS_HEARTBEAT_FREQUENCY=30 PREFECT_SERVER_ANALYTICS_ENABLED=false DO_NOT_TRACK=1

prefect server start --host 127.0.0.1 --port "$port" --log-level WARNING &
server=$!
trap 'kill $server 2>/dev/null || true; wait 2>/dev/null || true' EXIT
for _ in $(seq 120); do
  python -c "import urllib.request as u; u.urlopen('$PREFECT_API_URL/health', timeout=2)" 2>/dev/null && break
  kill -0 $server || exit 1
  sleep 1
done

prefect work-pool inspect tickets >/dev/null 2>&1 || prefect work-pool create --type process tickets
prefect --no-prompt deploy --prefect-file deployments/prefect.yaml --all
name="classify-tickets runs without heartbeat have crashed"
prefect automation inspect "$name" >/dev/null 2>&1 ||
  prefect automation create --from-file deployments/automations/crash-without-heartbeat.yaml
echo "Open http://127.0.0.1:$port and, in another shell, run:"
printf '  PREFECT_API_URL=%s %q deployment run classify-tickets/nightly --watch\n' "$PREFECT_API_URL" "$bin/prefect"
prefect worker start --pool tickets
