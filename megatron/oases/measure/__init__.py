"""Measuring a profile (cost/profile_file.py) with Megatron's own training steps on the user's own cluster."""
