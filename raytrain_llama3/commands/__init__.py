"""Commands beside `train`, one a module; `cli` picks one and turns what it raises into an exit code."""
