"""Ending a run between two steps when the system asks for it."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import torch
from transformers import TrainerCallback


class TrainingStopped(RuntimeError):
    """The run was told to end, and has; its last step is in a checkpoint."""


class StopOnSignal(TrainerCallback):
    """After SIGTERM training ends with the step finished and saved, the same in all processes.

    A context manager that holds the signal's handler; outside of the main thread, which alone may
    set one, it does nothing.
    """

    def __init__(self) -> None:
        self.asked = False
        self._previous: Any = None
        self._installed = False

    def __enter__(self) -> StopOnSignal:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGTERM, self._handle)
            self._installed = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._installed:
            signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)
            self._installed = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Asks for a checkpoint and the end if any process was told to end."""
        if args.world_size > 1:
            told = torch.tensor(int(self.asked), device=args.device)
            torch.distributed.all_reduce(told)
            self.asked = bool(told)
        if self.asked:
            control.should_save = control.should_training_stop = True
