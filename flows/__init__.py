"""Flows that Prefect runs. Importing the package sets what was not set: telemetry off, time for a server to start."""

import os
import sys

for _name, _value in {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "180",  # 20 by default: too short on a busy machine
    "GX_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "true",
}.items():
    os.environ.setdefault(_name, _value)

# The terminal shows the summary and errors; the UI has every log line. `--verbose` shows them here too.
if "--verbose" not in sys.argv:
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
