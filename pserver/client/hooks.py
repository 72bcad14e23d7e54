"""Hooks on a user's parameters and modules, which outlive what watches them."""

import weakref
from collections.abc import Sequence
from typing import Any

from torch.utils.hooks import RemovableHandle


def removed_with(watcher: object, hooks: Sequence[RemovableHandle]) -> "weakref.finalize[Any, Any]":
    """Sees to it that hooks are removed when what they serve is gone; call the result to remove them earlier."""

    def remove() -> None:
        for hook in hooks:
            hook.remove()

    return weakref.finalize(watcher, remove)
