"""The live storages of a stretch of work, where no allocator counts them."""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Live(TorchDispatchMode):
    """Counts the bytes of the storages that were made under it and are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {storage.data_ptr() for storage in _storages((args, kwargs))}
        for storage in _storages(out):
            if storage.data_ptr() not in given:  # a view of a weight is no new storage
                self._count(storage)
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage.data_ptr(), storage.nbytes()
        if key not in self.seen:
            self.seen.add(key)
            self.bytes += size
            self.peak = max(self.peak, self.bytes)
            weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.bytes -= size


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    leaves = torch.utils._pytree.tree_leaves(tree)
    return [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, Tensor)]
