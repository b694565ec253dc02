"""Cross-entropy of a sample's scored tokens, without the logits of all of them at once."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from elastic_compile import _state
from elastic_compile.training.data import IGNORED

logger = logging.getLogger("elastic_compile")

MOST_LOGITS = 1 << 26
"""Logits that exist at once, unless one token of every sample has more: 256 MiB in float32."""


def scored_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of every sample's scored tokens.

    Args:
        logits: [B, K, V]; position k predicts label k.
        labels: int64 [B, K], :data:`~elastic_compile.training.data.IGNORED` where not scored.

    Returns:
        float32 [B], nats a token.
    """
    return _losses(logits, labels).sum(1) / (labels != IGNORED).sum(1)


def forward_scored(
    model: nn.Module, inputs: Mapping[str, Tensor], accepts_keep: bool
) -> tuple[Tensor, Tensor]:
    """One forward pass over prompt and scored tokens.

    Args:
        model: The model, ``route_length`` set by the caller.
        inputs: ``input_ids``, ``labels`` and ``route_length`` of
            :func:`~elastic_compile.training.data.collate`.
        accepts_keep: Whether the model can leave logits of the prompt out.

    Returns:
        Logits [B, K, V] and the labels [B, K] they predict, from the first scored token of any
        sample on.
    """
    labels = inputs["labels"]
    first = int(inputs["route_length"].min())
    kept = labels.shape[1] - first + 1
    extra = {"logits_to_keep": kept} if accepts_keep else {}
    logits = model(input_ids=inputs["input_ids"], use_cache=False, **extra).logits
    return logits[:, -kept:-1], labels[:, first:]


class ChunkedLoss:
    """Losses of a forward pass whose logits are made, and made again backward, in chunks of tokens.

    What a model does after its head (a soft-cap, a scale) is its own code's: a chunk is the model's
    forward with the backbone's result replaced. The first chunked pass compares its last token with
    the model's own logits; where they differ, whole logits are used, and the user is told.

    Args:
        model: The model as it is trained, which may be wrapped.
        most_logits: Passes with more are chunked.
    """

    def __init__(self, model: nn.Module, most_logits: int = MOST_LOGITS) -> None:
        self.most_logits = most_logits
        self.accepts_keep = accepts_logits_to_keep(model)
        self.base: Any = _state.owner(model) or model
        prefix = getattr(self.base, "base_model_prefix", "")
        self.backbone = getattr(self.base, prefix, None) if prefix else None
        config: Any = getattr(self.base, "config", None)
        if hasattr(config, "get_text_config"):
            config = config.get_text_config()
        self.vocabulary = int(getattr(config, "vocab_size", 0))
        self.checked = False

    def __call__(self, model: nn.Module, inputs: Mapping[str, Tensor]) -> Tensor:
        """One forward pass; arguments as :func:`forward_scored`, result as :func:`scored_loss`."""
        labels = inputs["labels"]
        labels = labels[:, int(inputs["route_length"].min()) :]
        samples, scored = labels.shape
        fits = samples * scored * self.vocabulary <= self.most_logits
        if fits or not self.accepts_keep or not isinstance(self.backbone, nn.Module):
            return scored_loss(*forward_scored(model, inputs, self.accepts_keep))
        found: list[Any] = []
        handle = self.backbone.register_forward_hook(lambda *call: found.append(call[2]))
        try:
            last = model(input_ids=inputs["input_ids"], use_cache=False, logits_to_keep=1).logits
        finally:
            handle.remove()
        if not self._agrees(found, last):
            self.backbone = None
            return scored_loss(*forward_scored(model, inputs, self.accepts_keep))
        kind, hidden = type(found[-1]), found[-1].last_hidden_state[:, -scored - 1 : -1]

        def summed(hidden: Tensor, labels: Tensor) -> Tensor:
            return _losses(self._logits(kind, hidden), labels).sum(1)

        tokens = max(1, self.most_logits // (samples * self.vocabulary))
        total = torch.zeros(samples, device=hidden.device)
        for part, wanted in zip(hidden.split(tokens, 1), labels.split(tokens, 1), strict=True):
            total = total + checkpoint(
                summed, part, wanted, use_reentrant=False, preserve_rng_state=False
            )
        return total / (labels != IGNORED).sum(1)

    def _logits(self, kind: Any, hidden: Tensor) -> Tensor:
        """The model's logits [B, T, V] for hidden states [B, T, D] of its backbone."""
        backbone = self.backbone
        assert isinstance(backbone, nn.Module)
        replaced = "forward" in backbone.__dict__
        before: Any = backbone.__dict__.get("forward")
        backbone.forward = lambda *args, **kwargs: kind(last_hidden_state=hidden)
        try:
            tokens = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
            logits: Tensor = self.base.forward(input_ids=tokens, use_cache=False).logits
            return logits
        finally:
            del backbone.forward
            if replaced:
                backbone.forward = before

    def _agrees(self, found: list[Any], last: Tensor) -> bool:
        if self.checked:
            return True
        self.checked = True
        reason = "its backbone's result was not seen"
        if len(found) == 1 and getattr(found[0], "last_hidden_state", None) is not None:
            with torch.no_grad():
                try:
                    mine = self._logits(type(found[0]), found[0].last_hidden_state[:, -1:])
                    difference = (mine.float() - last.float()).norm() / last.float().norm()
                    if mine.shape == last.shape and bool(difference < 1e-3):
                        return True
                    reason = f"they differ by {difference.item():.1e} from its own"
                except Exception as error:
                    reason = f"its forward does not run on given hidden states ({error})"
        logger.warning(
            "logits of %s cannot be made in chunks: %s. All logits of a pass are held at once; "
            "lower micro_batch or length if memory runs out",
            type(self.base).__name__,
            reason,
        )
        return False


def _losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy [B, K] of logits [B, K, V], float32; 0 where not scored."""
    return cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
    ).view_as(labels)


def accepts_logits_to_keep(model: nn.Module) -> bool:
    """Whether the model's forward can leave out the logits of the prompt."""
    base = _state.owner(model) or model
    return "logits_to_keep" in inspect.signature(type(base).forward).parameters
