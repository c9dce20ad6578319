"""Our decoders are GPT-2, Llama, Mistral, Qwen2 and Qwen3: transformers' own, on the same weights.

Beside the twins' agreement with each other, this says what they agree on, in fp64. All but GPT-2
cast to float32 in rotary table, norm and softmax, which under float64 is a cast down: float32 means
float64 inside those modules here, so that the claim is about the model. Nothing is downloaded.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import modeling_rope_utils
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from lockstep.config import ModelConfig
from lockstep.data.batch import Batch
from lockstep.judge.tolerances import NORM
from lockstep.model.params import Arrays
from parity_tests import hf_model
from parity_tests.pair import FRAMEWORKS, norm_gap, perturbed, random_batch, start, toy

# float64 rounds at 1.1e-16; the worst gap seen, over logits and all gradients, is 1.2e-15.
BOUND = NORM.bound
# What another epsilon shows in *every* tensor, so that no comparison is idle. Seen: 1.8e-4.
VISIBLE = 10_000 * BOUND

NARROW = (modeling_llama, modeling_mistral, modeling_qwen2, modeling_qwen3, modeling_rope_utils)

# No two axes of a case are equal, so that none can stand for another.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2-tied": ("gpt2", dict(n_layer=2, n_head=3, d_model=24, context=9, vocab=53)),
    "gpt2-untied": ("gpt2", dict(n_layer=1, n_head=1, d_model=40, context=7, vocab=31, tied=False)),
    "llama-untied": ("tiny", dict(n_layer=2, n_head=5, d_model=40, context=11, vocab=37)),
    "llama-tied": ("tiny", dict(n_layer=1, n_head=3, d_model=36, context=14, vocab=61, tied=True)),
    "gpt2-erf": ("gpt2", dict(n_layer=1, n_head=2, d_model=22, context=8, vocab=31, mlp="gelu-erf",
                              mlp_dim=47, norm_eps=1e-3)),
    "llama-3": ("tiny", dict(n_layer=2, n_head=6, n_kv_head=2, d_model=48, mlp_dim=70, context=13,
                             vocab=41, rope="base=500,factor=4,low=1,high=4,original=16")),
    "mistral": ("tiny", dict(n_layer=1, n_head=4, n_kv_head=2, d_model=36, head_dim=10, context=13,
                             vocab=41, window=13, rope="base=1000000", norm_eps=3e-6)),
    "qwen-2": ("tiny", dict(n_layer=1, n_head=4, n_kv_head=1, d_model=40, context=12, vocab=41,
                            qkv_bias=True, norm_eps=3e-6, tied=True)),
    "qwen-3": ("tiny", dict(n_layer=2, n_head=4, n_kv_head=2, d_model=36, head_dim=14, context=12,
                            vocab=43, qk_norm=True, norm_eps=3e-6)),
}  # fmt: skip


class Result(NamedTuple):
    loss: float
    logits: np.ndarray
    grads: Arrays  # in transformers' names and layouts


class Case(NamedTuple):
    model: ModelConfig
    weights: Arrays
    batch: Batch
    ours: dict[str, Result]


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    family, shape = CASES[request.param]
    config = toy(family, policy="fp64", **shape)
    state, (b, t, v) = perturbed(config), (3, config.model.context, config.model.vocab)
    batch = random_batch(b, t, vocab=v, seed=7)
    ours = {}
    for framework in FRAMEWORKS:
        twin = start(framework, config, state)
        loss, grads = twin.loss_and_grads(batch)
        logits = twin.trace(batch).activations["logits"]
        ours[framework] = Result(loss, logits, hf_model.translate(config.model, grads))
    return Case(config.model, state.params, batch, ours)


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside transformers' Llama and its like, float32 means float64."""
    doubled: dict[str, Any] = vars(torch) | {"float32": torch.float64, "float": torch.float64}
    for module in NARROW:
        monkeypatch.setattr(module, "torch", SimpleNamespace(**doubled))
    monkeypatch.setattr(Tensor, "float", Tensor.double)


def theirs(case: Case, **changed: Any) -> Result:
    model = hf_model.build(case.model, **changed).double()
    hf_model.load(model, case.model, case.weights)
    named = dict(model.named_parameters())
    tokens, targets = (torch.from_numpy(x).long() for x in case.batch[:2])
    logits = model(tokens, use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    grads = {name: p.grad.numpy() for name, p in named.items() if p.grad is not None}
    return Result(loss.item(), logits.detach().numpy(), grads)


def gaps(ours: Result, theirs: Result) -> dict[str, float]:
    """The norm rule's figure of the logits and of each parameter's gradient."""
    assert ours.grads.keys() == theirs.grads.keys()
    assert ours.logits.shape == theirs.logits.shape
    grads = {name: norm_gap(ours.grads[name], grad) for name, grad in theirs.grads.items()}
    return {"logits": norm_gap(ours.logits, theirs.logits), **grads}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_logits_and_gradients_are_those_of_transformers(
    case: Case, framework: str, wide: None
) -> None:
    reference, ours = theirs(case), case.ours[framework]
    found = gaps(ours, reference)
    assert abs(ours.loss - reference.loss) <= 1e-12  # of about 4; seen: 1.8e-15
    assert max(found.values()) <= BOUND, found
    epsilon = "rms_norm_eps" if case.model.mlp == "swiglu" else "layer_norm_epsilon"
    assert min(gaps(ours, theirs(case, **{epsilon: 1e-6})).values()) > VISIBLE
