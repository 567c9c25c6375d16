"""Turning text into the token files that Megatron trains on; see docs/data.md."""
