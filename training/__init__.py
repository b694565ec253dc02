"""Router training: relaxation, constraint, trainer, tasks, data, evaluation and plots.

``fit`` trains the routers of a model, ``evaluate`` compares full, streaming and routed attention.
Everything is imported on first use: the relaxation alone needs torch only, the trainer accelerate.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_compile.training._evaluate import Evaluation, evaluate
    from elastic_compile.training._fit import FitResult, fit
    from elastic_compile.training._stop import TrainingStopped
    from elastic_compile.training.constraints import Target
    from elastic_compile.training.settings import FitSettings
    from elastic_compile.training.trainer import RouterTrainer, TrainingDiverged

_EXPORTS = {
    "Evaluation": "elastic_compile.training._evaluate",
    "FitResult": "elastic_compile.training._fit",
    "FitSettings": "elastic_compile.training.settings",
    "RouterTrainer": "elastic_compile.training.trainer",
    "Target": "elastic_compile.training.constraints",
    "TrainingDiverged": "elastic_compile.training.trainer",
    "TrainingStopped": "elastic_compile.training._stop",
    "evaluate": "elastic_compile.training._evaluate",
    "fit": "elastic_compile.training._fit",
}

__all__ = [
    "Evaluation",
    "FitResult",
    "FitSettings",
    "RouterTrainer",
    "Target",
    "TrainingDiverged",
    "TrainingStopped",
    "evaluate",
    "fit",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
