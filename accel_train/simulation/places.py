"""Position within a step: its part and the current module, followed by torch's hooks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from accel_train.simulation.tensors.fake_tensors import in_backward, tensors_in

FORWARD = "forward"
BACKWARD = "backward"
BEFORE = "before the first forward"
CLIP = "after the last backward"
STEP = "optimizer step"
AFTER = "after the optimizer step"


class Places:
    """Follows one model through its steps."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name or type(module).__name__ for name, module in model.named_modules()}
        self._root = model
        self._stack: list[str] = []
        self._backward = ""
        self._part = BEFORE
        self._followed: Callable[[], Tensor | None] = lambda: None
        """The last output that was hooked, held weakly: a strong reference would keep its memory alive."""
        self.before_forward: Callable[[], None] = lambda: None
        """Called before each forward of the whole model."""
        self.before_step: Callable[[], None] = lambda: None
        """Called before the optimizer steps."""

    def now(self) -> tuple[str, str]:
        """Return the part of the step, and a description that names the module."""
        if in_backward():
            if self._stack:
                # A forward inside a backward can only be a recomputation.
                return BACKWARD, f"backward, {self._stack[-1]} recomputed"
            return BACKWARD, f"backward of {self._backward or 'the loss'}"
        if self._stack:
            return FORWARD, f"forward of {self._stack[-1]}"
        # The loss is computed between the model and the backward.
        return self._part, "forward of the loss" if self._part == FORWARD else self._part

    @contextmanager
    def following(self) -> Generator[None]:
        """Follow the model while the body runs."""
        with ExitStack() as handles:
            for handle in (
                hooks.register_module_forward_pre_hook(self._enter),
                hooks.register_module_forward_hook(self._leave, always_call=True),
                register_optimizer_step_pre_hook(self._step),
                register_optimizer_step_post_hook(self._stepped),
            ):
                handles.callback(handle.remove)
            yield

    def _enter(self, module: nn.Module, _: Any) -> None:
        if module is self._root:
            self.before_forward()
            self._part = FORWARD
            # Otherwise the last module of the previous micro-batch would be named for the loss of this one.
            self._backward = ""
        name = self._names.get(id(module))
        if name is not None:
            self._stack.append(name)

    def _leave(self, module: nn.Module, _: Any, output: Any) -> None:
        name = self._names.get(id(module))
        if name is None:
            return
        if name in self._stack:
            # Also drops the modules inside it, which an early-stopped recomputation never left.
            del self._stack[self._stack.index(name) :]
        if not in_backward():
            for tensor in tensors_in(output):
                self._follow(tensor, name)

    def _follow(self, tensor: Tensor, name: str) -> None:
        def arrived(_: Tensor) -> None:
            # The gradient of its output has arrived, so this module's backward runs next.
            self._backward = name
            self._stack.clear()
            self._part = CLIP

        # Each output is hooked once: a container that returns the output of its last part would hide that part.
        if tensor.requires_grad and torch.is_grad_enabled() and self._followed() is not tensor:
            tensor.register_hook(arrived)
            self._followed = weakref.ref(tensor)

    def _step(self, *_: Any) -> None:
        self.before_step()
        self._part = STEP

    def _stepped(self, *_: Any) -> None:
        self._part = AFTER
