"""Remat changes no bit of the gradients, with dropout on, and keeps fewer bytes."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torch_ref.remat
from lockstep.twin import TrainState
from parity_tests.pair import FRAMEWORKS, perturbed, run, start, toy

MODES = ("sublayer", "block", "sqrt", "dots")


def after_one_step(framework: str, remat: str, **flags: Any) -> TrainState:
    """The first moments after one step are the clipped gradients times 1 - beta1."""
    config = toy(policy=flags.pop("policy", "bf16"), steps=1, dropout=0.2, remat=remat, **flags)
    twin = start(framework, config, perturbed(config))
    run(twin, config)
    return twin.state()


def assert_bitwise(a: TrainState, b: TrainState) -> None:
    for field in ("mu", "params"):
        for name, array in getattr(a, field).items():
            assert array.tobytes() == getattr(b, field)[name].tobytes(), (field, name)


@pytest.mark.parametrize(
    ("framework", "flags"),
    [
        ("jax", {"layers": "unroll"}),
        ("jax", {"layers": "scan", "policy": "fp32"}),
        ("torch", {}),
        ("torch", {"policy": "fp32"}),
        ("torch", {"numerics": "fast"}),
    ],
    ids=str,
)
def test_gradients_are_bitwise_equal(framework: str, flags: dict[str, Any]) -> None:
    # Four layers: sqrt is two segments of two.
    plain = after_one_step(framework, "none", n_layer=4, **flags)
    for remat in MODES:
        assert_bitwise(after_one_step(framework, remat, n_layer=4, **flags), plain)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_sqrt_with_a_longer_last_segment(framework: str) -> None:
    layers = {"n_layer": 5, "layers": "scan"}
    plain = after_one_step(framework, "none", **layers)
    assert_bitwise(after_one_step(framework, "sqrt", **layers), plain)


def test_a_redrawn_mask_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: torch's generator not restored for the recomputed forward."""
    plain = after_one_step("torch", "none", numerics="fast")
    forgetful = torch_ref.remat.partial(torch_ref.remat.recompute, preserve_rng_state=False)
    monkeypatch.setattr(torch_ref.remat, "recompute", forgetful)
    with pytest.raises(AssertionError):
        assert_bitwise(after_one_step("torch", "block", numerics="fast"), plain)


class Live(TorchDispatchMode):
    """Counts the bytes of the storages that were made under it and are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.seen = 0, set[int]()

    def __torch_dispatch__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None):
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage.data_ptr(), storage.nbytes()
        if key not in self.seen:
            self.seen.add(key)
            self.bytes += size
            weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.bytes -= size


def torch_kept(remat: str) -> int:
    """Bytes alive between forward and backward pass: what the graph keeps."""
    config = toy(policy="bf16", n_layer=9, context=32, remat=remat)
    trainer = start("torch", config).trainer  # type: ignore[attr-defined]
    tokens = torch.zeros((4, 33), dtype=torch.int64)
    with Live() as live:
        loss = trainer.batch_loss(trainer.model, tokens, trainer.roles)
        kept = live.bytes
    loss.backward()
    return kept


def jax_peak(remat: str) -> int:
    """Bytes of XLA's temporaries for a whole step, layers scanned."""
    # Batch and depth large enough for activations to outweigh the parameters' gradients.
    config = toy(policy="bf16", n_layer=16, context=32, batch_size=32, remat=remat, layers="scan")
    trainer = start("jax", config).trainer  # type: ignore[attr-defined]
    trainer.compile()
    return trainer.step.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("measure", [torch_kept, jax_peak])
def test_fewer_bytes_are_kept(measure: Callable[[str], int]) -> None:
    none, sublayer, block, sqrt, dots = (measure(mode) for mode in ("none", *MODES))
    assert sqrt < block < sublayer < none
    assert block < dots < none
