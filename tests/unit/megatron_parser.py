"""Megatron's parser with the Oases flags, as pretrain_gpt.py has it."""

import argparse
import functools

from megatron.oases.arguments import add_oases_arguments


def new_parser() -> argparse.ArgumentParser:
    """A parser of its own, for a test that changes its defaults."""
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    return add_oases_arguments(add_megatron_arguments(parser))


@functools.cache
def shared_parser() -> argparse.ArgumentParser:
    """One parser for all tests that only parse with it."""
    return new_parser()
