"""With fsdp PyTorch keeps no weight in the compute dtype for the backward pass."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from torch_ref.extra.mesh.mesh import linear_without_copy
from torch_ref.model import Product


def run(product: Product, dtype: torch.dtype, *, bias: bool) -> tuple[list[Tensor], list[Tensor]]:
    """The result and the gradients of a product under autocast; and what was kept for them."""
    random = torch.Generator().manual_seed(0)
    sizes = [(7, 48), (32, 48), (32,)][: 2 + bias]
    given = [torch.randn(size, generator=random).requires_grad_() for size in sizes]
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    watch = torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x)
    with watch, torch.autocast("cpu", dtype, cache_enabled=False):
        y = product(given[0], given[1], given[2] if bias else None)
    y.backward(torch.randn(y.shape, generator=random).to(y.dtype))
    return [y, *(x.grad for x in given if x.grad is not None)], kept


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_its_bits_are_the_same_and_no_copy_is_kept(dtype: torch.dtype, *, bias: bool) -> None:
    (usual, kept), (ours, spared) = (
        run(product, dtype, bias=bias) for product in (F.linear, linear_without_copy)
    )
    assert len(usual) == len(ours) == 3 + bias
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(usual, ours))
    copies = [[x for x in found if x.numel() == 32 * 48 and x.dtype == dtype]
              for found in (kept, spared)]  # fmt: skip
    assert copies[0] and not copies[1]


def test_outside_of_autocast_it_is_the_usual_product() -> None:
    x, weight = torch.randn(3, 4), torch.randn(5, 4, requires_grad=True)
    assert torch.equal(linear_without_copy(x, weight), F.linear(x, weight))
