"""Train Llama3 with Megatron-core under Ray."""

__version__ = "0.1.0"
