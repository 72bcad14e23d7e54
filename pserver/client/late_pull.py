"""A module's tensors get the servers' new values when they are looked at."""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from pserver.client.hooks import removed_with

#: Gives tensors, by index in the layout, their new values.
Take = Callable[[Iterable[int]], None]
_TABLES = ("_parameters", "_buffers")


class LatePull:
    """While values are on their way, whoever looks at a tensor of the module waits for it, and for it alone.

    A module's forward waits for the module's own tensors; each access to one, as an attribute or in an iteration, for
    that one. Tensors that somebody holds otherwise have their old values until then, never a part of the new ones.

    Args:
        module: whose tensors are meant.
        indices: of the tensors that get new values, in the layout.
        take: see `Take`; called on the thread that looks.
        complete: gives all their new values.

    Not thread-safe.
    """

    def __init__(
        self, module: torch.nn.Module, indices: Mapping[torch.Tensor, int], take: Take, complete: Callable[[], None]
    ) -> None:
        self._modules = [
            each
            for each in module.modules()
            if any(tensor in indices for tensor in (*each._parameters.values(), *each._buffers.values()))
        ]
        self._indices = indices
        self._take = take
        self._complete = complete
        self._waiting = False
        before, after = _Hook(self, LatePull._before_forward), _Hook(self, LatePull._after_forward)
        hooks = [each.register_forward_pre_hook(before) for each in self._modules]
        hooks.append(module.register_forward_pre_hook(before, prepend=True))
        hooks.append(module.register_forward_hook(after))
        self._remove_hooks = removed_with(self, hooks)

    def close(self) -> None:
        """Nobody waits any more."""
        self.end()
        self._remove_hooks()

    def begin(self) -> None:
        """Values are on their way."""
        self._waiting = True
        for module in self._modules:
            for table in _TABLES:
                module.__dict__[table] = _Guarded(module.__dict__[table], self._look_at)

    def end(self) -> None:
        """All values are there."""
        self._waiting = False
        for module in self._modules:
            for table in _TABLES:
                if isinstance(module.__dict__[table], _Guarded):
                    module.__dict__[table] = module.__dict__[table].unguarded()

    def _look_at(self, tensors: Iterable[torch.Tensor | None]) -> None:
        if not self._waiting:
            return
        found = [self._indices[each] for each in tensors if each is not None and each in self._indices]
        if found:
            self._take(found)

    def _before_forward(self, module: torch.nn.Module, *arguments: Any) -> None:
        if not self._waiting:
            return
        if torch.compiler.is_compiling():
            _now(self._complete)
            return
        for table in _TABLES:
            self._look_at(dict.values(module.__dict__[table]))

    def _after_forward(self, module: torch.nn.Module, *arguments: Any) -> None:
        # What the forward did not use; the backward pass may want to push early, and this comes first.
        if self._waiting and not torch.compiler.is_compiling():
            self._complete()


class _Hook:
    """A module's hook: a method of what watches the module, while that lives. Copies of the module are not watched."""

    def __init__(self, late: LatePull | None = None, method: Callable[..., None] | None = None) -> None:
        self._late = None if late is None else weakref.ref(late)
        self._method = method

    def __call__(self, module: torch.nn.Module, *arguments: Any) -> None:
        late = None if self._late is None else self._late()
        if late is not None and self._method is not None:
            self._method(late, module, *arguments)

    def __reduce__(self) -> Any:
        return _Hook, ()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _now(function: Callable[[], None]) -> None:
    """Compiled code calls it as it is."""
    function()


class _Guarded(dict[str, Any]):
    """A module's parameters or buffers by name, each up to date when somebody gets it."""

    def __init__(self, found: dict[str, Any], look_at: Callable[[Iterable[Any]], None]) -> None:
        super().__init__(found)
        self._look_at = look_at

    def unguarded(self) -> dict[str, Any]:
        """The same, as plain as they were."""
        return dict(super().items())

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        self._look_at((found,))
        return found

    def get(self, name: str, default: Any = None) -> Any:
        found = super().get(name, default)
        self._look_at((found,))
        return found

    def items(self) -> Any:
        self._look_at(super().values())
        return super().items()

    def values(self) -> Any:
        self._look_at(super().values())
        return super().values()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    def __reduce__(self) -> Any:
        return dict, (self.copy(),)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce__()
