"""Flows that Prefect runs. Importing the package switches the libraries' telemetry off, unless it was set."""

import os
import sys

for _name, _value in {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
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
