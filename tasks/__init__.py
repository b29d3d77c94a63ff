"""Prefect tasks, one file a stage: get inputs, call one engine function, log one line, return."""
