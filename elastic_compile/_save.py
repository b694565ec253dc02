"""``save_pretrained`` of a transformed model: the router goes beside the backbone."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

from torch import nn

from elastic_compile._checkpoint import save_router

FOLDER = "elastic_router"
"""Folder beside the saved backbone; ``transform(model, router=…)`` takes it."""


class SavePretrained:
    """Stands for ``save_pretrained`` on a transformed model's instance.

    The backbone's files are what the untouched model writes; the router is saved apart from its
    shards. An object and no bound method, so that copies and pickles keep it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        writes = args[0] if args else kwargs.get("is_main_process", True)
        # First, so that an upload that the original makes has it too.
        if writes and not os.path.isfile(save_directory):
            save_router(self.model, Path(save_directory) / FOLDER)
        original = type(self.model).save_pretrained  # type: ignore[attr-defined]
        return original(self.model, save_directory, *args, **kwargs)

    def __reduce__(self) -> Any:
        return SavePretrained, (self.model,)

    def __deepcopy__(self, memo: dict[int, Any]) -> SavePretrained:
        return SavePretrained(copy.deepcopy(self.model, memo))
