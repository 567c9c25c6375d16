"""Chooses every block's tensor-parallel degree, and whether it is recomputed."""
