"""Other programs on the same weights, prompts and processors, each in its own virtual environment.

`environments` sets them up, `run_*.py` run in them, `protocol` is how they are asked, `workers` asks.
"""
