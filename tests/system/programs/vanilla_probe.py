"""Runs pretrain_gpt.py and then prints which functions of Megatron's layers are no longer Megatron's own."""

import inspect
import sys
from pathlib import Path
from types import ModuleType

import pretrain_gpt

MODULES = (
    "megatron.core.tensor_parallel.mappings",
    "megatron.core.tensor_parallel.layers",
    "megatron.core.tensor_parallel.cross_entropy",
    "megatron.core.transformer.transformer_block",
    "megatron.core.transformer.transformer_layer",
    "megatron.core.transformer.attention",
    "megatron.core.transformer.mlp",
    "megatron.core.models.gpt.gpt_model",
)


_REPOSITORY = Path(pretrain_gpt.__file__).resolve().parent
_OURS = (str(_REPOSITORY / "megatron"), str(_REPOSITORY / "oases_patches"))


def foreign_functions(module: ModuleType) -> list[str]:
    """Functions of a module, and of its classes, whose code is this repository's."""
    classes = [value for value in vars(module).values() if inspect.isclass(value)]
    owners = [module, *(value for value in classes if value.__module__.startswith("megatron.core"))]
    foreign = []
    for owner in owners:
        for name, value in vars(owner).items():
            function = getattr(value, "__func__", value)
            code = getattr(function, "__code__", None)
            if code is not None and code.co_filename.startswith(_OURS):
                foreign.append(f"{module.__name__}:{name}")
    return foreign


if __name__ == "__main__":
    pretrain_gpt.main()
    foreign = [name for module in MODULES for name in foreign_functions(sys.modules[module])]
    print(f"foreign functions: {foreign}", flush=True)
    print(f"oases modules: {sorted(name for name in sys.modules if name.startswith('megatron.oases.'))}", flush=True)
