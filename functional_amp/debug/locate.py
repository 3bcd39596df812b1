"""Where an operator stands in the user's program: the module, the file and the line."""

from __future__ import annotations

import functools
import os
import sys
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import optree
import torch
from torch import nn
from torch.nn.modules import module as torch_module

import functional_amp.debug.torch_private as torch_private

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(str(path))) + os.sep for path in (torch.__file__, optree.__file__, _PACKAGE + "/x")
)
_CHECKPOINT = os.path.join("torch", "utils", "checkpoint.py")


@dataclass(frozen=True)
class Place:
    """A module by path and type, and a line of the user's; empty where there is none."""

    module: str = ""
    module_type: str = ""
    file: str = ""
    line: int | None = None


class Locator:
    """Follows the modules that are called, and remembers which line made which autograd node.

    Autograd numbers its nodes as the forward makes them. A node whose number lies between those at the start
    and at the end of a module's forward belongs to that module, in the backward too.

    Args:
        boundary: the function below which every frame is the user's or a library's.
    """

    def __init__(self, boundary: CodeType):
        self._boundary = boundary
        self._names: dict[int, str] = {}
        self._roots: list[nn.Module] = []  # kept alive: their ids are the keys of the names
        self._open: list[tuple[nn.Module, int]] = []
        self._intervals: list[tuple[int, int, nn.Module]] = []
        self._made: dict[int, tuple[str, int | None]] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> Locator:
        self._hooks = [
            torch_module.register_module_forward_pre_hook(self._enter_module),
            torch_module.register_module_forward_hook(self._leave_module, always_call=True),
        ]
        return self

    def __exit__(self, *error: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if id(module) not in self._names:
            self._roots.append(module)
            for name, submodule in module.named_modules():
                self._names.setdefault(id(submodule), name)
        self._open.append((module, torch_private.next_sequence_number()))

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._open:
            innermost, start = self._open.pop()
            self._intervals.append((start, torch_private.next_sequence_number(), innermost))
            if innermost is module:
                break

    def note_forward(self) -> None:
        """Remembers the line that is running as the one that made the newest autograd node."""
        made = torch_private.next_sequence_number() - 1
        if made not in self._made:
            self._made[made] = self._users_line()[:2]

    def in_forward(self) -> Place:
        """The place of the operator that is running, called by the loss function."""
        return Place(*self._innermost(), *self._users_line()[:2])

    def in_backward(self, number: int) -> tuple[Place, bool]:
        """The place of the forward that made the autograd node of this number.

        Returns:
            The place, and whether the operator belongs to a forward that is being repeated (a checkpoint).
            A line of the user's that runs in the backward itself (an autograd.Function's) counts first.
        """
        file, line, repeated = self._users_line()
        module = self._innermost() if self._open else self._of_node(number)
        if not file:
            earlier = [made for made in self._made if made <= number]
            file, line = self._made[max(earlier)] if earlier else ("", None)
        return Place(*module, file, line), repeated or bool(self._open)

    def _innermost(self) -> tuple[str, str]:
        return self._named(self._open[-1][0]) if self._open else ("", "")

    def _of_node(self, number: int) -> tuple[str, str]:
        around = [(end - start, module) for start, end, module in self._intervals if start <= number < end]
        return self._named(min(around, key=lambda interval: interval[0])[1]) if around else ("", "")

    def _named(self, module: nn.Module) -> tuple[str, str]:
        return self._names[id(module)], type(module).__name__

    def _users_line(self) -> tuple[str, int | None, bool]:
        """The innermost line outside the libraries, and whether a checkpoint repeats its forward."""
        frame: FrameType | None = sys._getframe(1)
        file, line, checkpoint = "", None, False
        while frame is not None and frame.f_code is not self._boundary:
            owner = _owner(frame.f_code.co_filename)
            if owner == "checkpoint":
                checkpoint = True
            elif owner == "user" and not file:
                file, line = frame.f_code.co_filename, frame.f_lineno
            frame = frame.f_back
        return (file, line, checkpoint) if frame is not None else ("", None, checkpoint)


@functools.cache
def _owner(file: str) -> str:
    """Whose a file of code is: a library's, the user's, or torch's checkpoint."""
    if file.endswith(_CHECKPOINT):
        return "checkpoint"
    generated = file.startswith(("<frozen", "<string>", "<eval"))
    return "library" if generated or os.path.abspath(file).startswith(_LIBRARIES) else "user"
