"""The rules in numpy are those of torch and optax: each library's optimizer is found by its own."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.check.causes import differ, solve
from lockstep.check.causes.rules import BF16, L2, TRUST
from lockstep_recorder.jax_floats import widened
from lockstep_recorder.recording import CYCLES, SCALES

Arrays = dict[str, np.ndarray]
Step = Callable[[Arrays, Arrays], Arrays]  # weights and gradients -> what is added to the weights
SHAPES = {"wide": (5, 3, 2), "thin": (7,), "pairs": (4, 2)}


def draw(seed: int) -> Arrays:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape) for name, shape in SHAPES.items()}


def by_torch(make: Callable[[list[torch.Tensor]], Any]) -> Step:
    parameters = {name: torch.nn.Parameter(torch.from_numpy(x)) for name, x in draw(0).items()}
    rule = make(list(parameters.values()))

    def step(weights: Arrays, grads: Arrays) -> Arrays:
        for name, p in parameters.items():
            p.data.copy_(torch.from_numpy(weights[name]))
            p.grad = torch.from_numpy(grads[name].copy())
        rule.step()
        return {name: p.detach().numpy() - weights[name] for name, p in parameters.items()}

    return step


def by_optax(transform: Any) -> Step:
    import jax

    state = transform.init(draw(0))
    update = jax.jit(transform.update)

    def step(weights: Arrays, grads: Arrays) -> Arrays:
        nonlocal state
        moved, state = update(grads, state, weights)
        # As a recorder sees it: the difference of weights.
        return {name: (weights[name] + np.asarray(x)) - weights[name] for name, x in moved.items()}

    return step


def history(
    make: Callable[[], Step], n: int = 1, scale_of: dict[str, float] | None = None
) -> solve.History:
    """Returns what a recording feeds and what the optimizer does, changes rounded as weights.

    Args:
        scale_of: of some tensors' gradients.
    """
    labels = SCALES if n == 1 else {"cycles": tuple(s for s in CYCLES for _ in range(n))}
    found: solve.History = {}
    for label, scales in labels.items():
        step, weights, fed = make(), draw(1), []
        parts: dict[str, list[tuple[np.ndarray, ...]]] = {name: [] for name in SHAPES}
        for at, scale in enumerate(scales):
            grads = {name: scale * (scale_of or {}).get(name, 1.0) * g
                     for name, g in draw(2 + at).items()}  # fmt: skip
            change = step(weights, grads)
            for name, kept in parts.items():
                kept.append((weights[name], grads[name], change[name]))
            fed.append(grads)
            weights = {name: x + change[name] for name, x in weights.items()}
        found[label] = {name: solve.sequence(kept, fed, n) for name, kept in parts.items()}
    return found


TORCH: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "SGD": (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
            {"rule": "SGD", "momentum": 0.9, "Nesterov": True}),
    "AdamW": (lambda p: torch.optim.AdamW(p, 1e-3, weight_decay=0.1),
              {"rule": "Adam", "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}),
    "AMSGrad": (lambda p: torch.optim.Adam(p, 1e-3, amsgrad=True),
                {"rule": "Adam", "largest square (AMSGrad)": True}),
    "NAdam": (lambda p: torch.optim.NAdam(p, 1e-3), {"rule": "NAdam", "momentum decay": 0.004}),
    "RMSprop": (lambda p: torch.optim.RMSprop(p, 1e-2, eps=0.01, momentum=0.9),
                {"rule": "RMSprop", "decay": 0.99, "eps": 0.01, "eps is": "outside the root",
                 "momentum": 0.9}),
    "RMSprop, centred": (lambda p: torch.optim.RMSprop(p, 1e-2, centered=True),
                         {"rule": "RMSprop", "centred": True}),
    "Adagrad": (lambda p: torch.optim.Adagrad(p, 1e-2),
                {"rule": "Adagrad", "first square": 0.0, "eps": 1e-10}),
    "Adamax": (lambda p: torch.optim.Adamax(p, 1e-2, betas=(0.9, 0.99)),
               {"rule": "Adamax", "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}),
    "Adadelta": (lambda p: torch.optim.Adadelta(p, 1.0, rho=0.95),
                 {"rule": "Adadelta", "decay": 0.95, "eps": 1e-6}),
    "Adafactor": (lambda p: torch.optim.Adafactor(p, 1e-2),
                  {"rule": "Adafactor", "squares": "factored", "exponent of decay": 0.8,
                   "rate times the tensor's size": True, "updates of size 1 at most": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", TORCH)
def test_a_rule_of_torch_is_found(name: str) -> None:
    make, expected = TORCH[name]
    (found,) = solve.find_rules(history(lambda: by_torch(make)))
    assert found.options.items() >= expected.items(), found.options
    assert set(found.rate) == set(SHAPES)


def optaxs() -> dict[str, tuple[Any, dict[str, Any]]]:
    optax = pytest.importorskip("optax")
    jnp = pytest.importorskip("jax.numpy")
    return {
        "adamw": (optax.adamw(1e-3), {"rule": "Adam", "eps": 1e-8}),
        "nadam": (optax.nadam(1e-3), {"rule": "NAdam", "momentum decay": 0.0}),
        "rmsprop": (optax.rmsprop(1e-2),
                    {"rule": "RMSprop", "decay": 0.9, "eps is": "inside the root"}),
        "rmsprop from one": (optax.rmsprop(1e-2, initial_scale=1.0),
                             {"rule": "RMSprop", "first square": 1.0}),
        "adagrad": (optax.adagrad(1e-2),
                    {"rule": "Adagrad", "first square": 0.1, "eps is": "inside the root"}),
        "lion": (optax.lion(1e-4, weight_decay=1.0), {"rule": "Lion", "beta1": 0.9, "beta2": 0.99}),
        "lion otherwise": (optax.lion(1e-4, b1=0.99, b2=0.9, weight_decay=1.0),
                           {"rule": "Lion", "beta1": 0.99, "beta2": 0.9}),
        "adamax": (optax.adamax(1e-2), {"rule": "Adamax", "beta2": 0.999}),
        "adadelta": (optax.adadelta(1.0), {"rule": "Adadelta", "decay": 0.9}),
        "lamb": (optax.lamb(1e-2), {"rule": "Adam", "eps": 1e-6, TRUST: True}),
        "adafactor": (optax.adafactor(1e-2), {"rule": "Adafactor", "squares": "whole"}),
        "bf16 moments": (optax.adamw(1e-3, mu_dtype=jnp.bfloat16),
                         {"rule": "Adam", "moments": BF16[0]}),
        "clipped": (optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-3)),
                    {"clip": "norm 0.5", "clip's epsilon": 0.0}),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["adamw", "nadam", "rmsprop", "rmsprop from one", "adagrad",
                                  "lion", "lion otherwise", "adamax", "adadelta", "lamb",
                                  "adafactor", "bf16 moments", "clipped"])  # fmt: skip
def test_a_rule_of_optax_is_found(name: str) -> None:
    jax = pytest.importorskip("jax")
    with jax.enable_x64(True), widened(("float32",)):
        transform, expected = optaxs()[name]
        found = solve.find_rules(history(lambda: by_optax(transform)))
    assert len(found) == 1
    assert found[0].options.items() >= expected.items(), found[0].options


def test_a_count_of_steps_is_no_float32_in_float64() -> None:
    """optax's Adafactor makes float32 of its count; a power of that is apart by 1e-8."""
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
    with jax.enable_x64(True), widened(("float32",)):
        ours = by_optax(optax.adafactor(1e-2, min_dim_size_to_factor=1))
        found = [ours(draw(1), draw(2 + at)) for at in range(4)]
    theirs = by_torch(lambda p: torch.optim.Adafactor(p, 1e-2))
    for at, changes in enumerate(found):
        expected = theirs(draw(1), draw(2 + at))
        for name in ("thin", "pairs"):  # of three axes the libraries factor others
            np.testing.assert_allclose(changes[name], expected[name], rtol=1e-12)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-3, weight_decay=0.1)


def test_updates_relative_to_a_fused_tensor_are_found_in_its_parts() -> None:
    """A part's own ratio is another one."""
    jax = pytest.importorskip("jax")
    with jax.enable_x64(True):
        found = history(lambda: by_optax(optaxs()["lamb"][0]))
    for rows in found.values():
        wide = rows.pop("wide")
        for name, part in (("a", slice(12)), ("b", slice(12, None))):
            flat = {of: getattr(wide, of)[:, part] for of in ("weights", "grads", "changes")}
            rows[name] = replace(wide, **flat, whole=np.zeros(0))
    (rule,) = solve.find_rules(found)
    assert rule.options[TRUST] and rule.rate == dict.fromkeys(rule.rate, pytest.approx(0.01))


def test_no_rule_is_found_where_none_is() -> None:
    """A rule that the catalogue lacks, beside one that it has."""

    def cubed(weights: Arrays, grads: Arrays) -> Arrays:
        return {name: -1e-3 * np.cbrt(g) * np.sin(weights[name]) for name, g in grads.items()}

    assert solve.find_rules(history(lambda: cubed)) == []


def clip(grads: Arrays, limit: float) -> Arrays:
    norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
    return {name: g * min(1.0, limit / (norm + 1e-6)) for name, g in grads.items()}


def gathered(n: int, *, mean: bool = True, each: float = 0.0, whole: float = 0.0) -> Step:
    """AdamW with one update of `n` gradients.

    Args:
        each: the norm to which each gradient is clipped; `whole`, all of them together.
    """
    rule, kept = by_torch(adamw), []

    def step(weights: Arrays, grads: Arrays) -> Arrays:
        kept.append(clip(grads, each) if each else grads)
        if len(kept) < n:
            return {name: np.zeros_like(x) for name, x in weights.items()}
        scale = 1 / n if mean else 1.0
        total = {name: scale * np.sum([g[name] for g in kept], axis=0) for name in weights}
        kept.clear()
        return rule(weights, clip(total, whole) if whole else total)

    return step


def decayed_after(weights: Arrays, grads: Arrays) -> Arrays:
    return {name: (x - 0.1 * grads[name]) * (1 - 0.1 * 0.3) - x for name, x in weights.items()}


def decayed_before(weights: Arrays, grads: Arrays) -> Arrays:
    return {name: -0.1 * grads[name] - 0.1 * 0.3 * x for name, x in weights.items()}


def two_rules(other: Callable[..., Any]) -> Step:
    """Adam for one tensor, and another for the second."""
    return by_torch(lambda p: Both(torch.optim.Adam(p[:1], 1e-2), other(p[1:])))


class Both:
    def __init__(self, *rules: torch.optim.Optimizer) -> None:
        self.rules = rules

    def step(self) -> None:
        for rule in self.rules:
            rule.step()


DIFFERENCES: dict[str, tuple[int, Callable[[], Step], Callable[[], Step], str, str]] = {
    "a mean for a sum": (
        3, lambda: gathered(3, mean=False), lambda: gathered(3),
        "the mean of 3 gradients, for their sum", "mean of accumulated gradients"),
    "each gradient is clipped": (
        3, lambda: gathered(3, whole=0.5), lambda: gathered(3, each=0.5),
        "clipped is each gradient, for all gradients of an update", "optimizer's clip"),
    "the clip of gathered gradients": (
        2, lambda: gathered(2, whole=0.5), lambda: gathered(2), "clip none, for norm 0.5",
        "optimizer's clip"),
    "decay after the step": (
        1, lambda: decayed_before, lambda: decayed_after,
        "weights decay after the step, for before it", "weight decay's place"),
    "another rule of one tensor": (
        1, lambda: two_rules(lambda p: torch.optim.Adam(p, 1e-2)),
        lambda: two_rules(lambda p: torch.optim.SGD(p, 1e-2)), "rule SGD", "optimizer's rule"),
    "RMSprop's epsilon": (
        1, lambda: by_torch(lambda p: torch.optim.RMSprop(p, 1e-2, eps=0.01)),
        lambda: by_torch(lambda p: torch.optim.RMSprop(p, 1e-2)), "eps 1e-08, for 0.01",
        "optimizer's eps"),
    "a clip of each tensor": (
        1, lambda: clipping(adamw, together=True), lambda: clipping(adamw, together=False),
        "clip norm 0.5 of each tensor, for norm 0.5", "optimizer's clip"),
    "RMSprop that is not centred": (
        1, lambda: by_torch(lambda p: torch.optim.RMSprop(p, 1e-2, centered=True)),
        lambda: by_torch(lambda p: torch.optim.RMSprop(p, 1e-2)), "centred False, for True",
        "optimizer's option"),
    "moments in bfloat16": (
        1, lambda: by_torch(adamw), lambda: in_bfloat16(),
        "moments in bfloat16, for the weights' format", "optimizer's moments"),
    "a complex gradient that is not conjugated": (
        1, lambda: by_torch(adamw), lambda: conjugated(by_torch(adamw)),
        "the gradient of complex tensors is its conjugate", "gradient not conjugated"),
}  # fmt: skip


def conjugated(rule: Step) -> Step:
    """The rule, given the pairs' second numbers with the other sign."""

    def step(weights: Arrays, grads: Arrays) -> Arrays:
        return rule(weights, {**grads, "pairs": grads["pairs"] * [1.0, -1.0]})

    return step


def in_bfloat16() -> Step:
    """AdamW whose moments are kept in bfloat16."""
    m, v = ({name: torch.zeros(shape) for name, shape in SHAPES.items()} for _ in range(2))
    count = 0

    def step(weights: Arrays, grads: Arrays) -> Arrays:
        nonlocal count
        count, found = count + 1, {}
        for name, g in ((name, torch.from_numpy(x)) for name, x in grads.items()):
            m[name] = (0.9 * m[name].double() + 0.1 * g).to(torch.bfloat16)
            v[name] = (0.999 * v[name].double() + 0.001 * g**2).to(torch.bfloat16)
            root = (v[name].double() / (1 - 0.999**count)).sqrt() + 1e-8
            move = m[name].double() / (1 - 0.9**count) / root
            found[name] = (-1e-3 * move).numpy() - 1e-4 * weights[name]
        return found

    return step


def clipping(make: Callable[..., Any], *, together: bool, limit: float = 0.5) -> Step:
    rule = by_torch(make)

    def step(weights: Arrays, grads: Arrays) -> Arrays:
        parts = [{name: g} for name, g in grads.items()] if not together else [grads]
        return rule(weights, {n: g for part in parts for n, g in clip(part, limit).items()})

    return step


def lion(b1: float, b2: float) -> Step:
    """Lion, of which signs alone are seen."""
    m = {name: np.zeros(shape) for name, shape in SHAPES.items()}

    def step(weights: Arrays, grads: Arrays) -> Arrays:
        found = {}
        for name, g in grads.items():
            found[name] = -1e-3 * (np.sign(b1 * m[name] + (1 - b1) * g) + 0.3 * weights[name])
            m[name] = b2 * m[name] + (1 - b2) * g
        return found

    return step


def test_a_sign_rule_is_that_of_all_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensor with the largest gradients fits many betas, and one fits them all."""
    for name, shape in (("long", (9, 40)), ("tall", (11, 30))):
        monkeypatch.setitem(SHAPES, name, shape)
    theirs, ours = (history(partial(lion, *b)) for b in ((0.9, 0.98), (0.98, 0.9)))
    rules = solve.find_rules(theirs)
    found = differ.compare(rules, solve.find_rules(ours, tuple(rules)))
    assert found and found.text == "beta1 0.98, for 0.9; beta2 0.9, for 0.98"


def test_a_tensor_without_gradient_has_the_decay_of_others() -> None:
    """A key's bias: its gradient is rounding, and its weight decays."""

    def decaying(names: tuple[str, ...]) -> solve.History:
        def make() -> Step:
            rule = by_torch(lambda p: torch.optim.Adam(p, 1e-3))

            def step(weights: Arrays, grads: Arrays) -> Arrays:
                moved = rule(weights, grads)
                return {n: x - 1e-4 * weights[n] * (n in names) for n, x in moved.items()}

            return step

        return history(make, scale_of={"thin": 1e-17})

    both = decaying(tuple(SHAPES)), decaying(("wide", "pairs"))
    theirs, ours = map(solve.find_rules, both)
    found = differ.compare(theirs, ours)
    assert found and found.text == "weight decay 0, for 0.1, of thin"


def test_a_clip_of_another_kind_is_told_without_its_epsilon() -> None:
    def by_value() -> Step:
        rule = by_torch(adamw)

        def step(weights: Arrays, grads: Arrays) -> Arrays:
            return rule(weights, {name: np.clip(g, -0.5, 0.5) for name, g in grads.items()})

        return step

    both = history(by_value), history(lambda: clipping(adamw, together=True))
    theirs, ours = map(solve.find_rules, both)
    found = differ.compare(theirs, ours)
    assert found and found.text == "clip norm 0.5, for value 0.5"


def test_a_decay_beside_a_relative_update_is_no_missing_ratio() -> None:
    """A LAMB that decays beside its ratio fits Adam, with rates that differ by tensor and step."""
    rate = {"a": 0.1, "b": 0.3}
    own = solve.Rule({"rule": "Adam", L2: 0.0}, [0.1, 0.2], dict.fromkeys(rate, 0.0), rate,
                     dict.fromkeys(rate, 0.0), {"a": [0.1, 0.2], "b": [0.3, 0.1]})  # fmt: skip
    groups = replace(own, by_step={"a": [0.1, 0.2], "b": [0.3, 0.6]})
    relative = replace(own, options={**own.options, TRUST: True},
                       by_step={name: [0.1, 0.2] for name in rate})  # fmt: skip
    assert differ.compare([relative], [own]) is None is differ.compare([own], [relative])
    found = differ.compare([relative], [groups])
    assert found and "relative to the weights (LAMB, LARS) none, for True" in found.text


def test_optaxs_clip_without_epsilon_is_no_part_of_another_cause() -> None:
    options = {"rule": "SGD", "clip": "norm 1", L2: 0.0}
    rules = [solve.Rule({**options, "clip's epsilon": eps, "momentum": momentum}, [0.1],
                            {"a": 0.0}, {"a": 0.1}, {"a": 0.0})
             for eps, momentum in ((1e-6, 0.9), (0.0, 0.8))]  # fmt: skip
    for by_optax, said in ((True, "momentum 0.8, for 0.9"),
                           (False, f"{differ.NO_EPSILON}; momentum 0.8, for 0.9")):  # fmt: skip
        found = differ.compare([rules[0]], [rules[1]], 1, by_optax)
        assert found and found.text == said


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_difference_is_said(name: str) -> None:
    n, theirs, ours, said, entry = DIFFERENCES[name]
    rules = [solve.find_rules(history(make, n)) for make in (theirs, ours)]
    found = differ.compare(rules[0], rules[1], n)
    assert found and said in found.text and found.entry == entry, found
    assert "learning rate 0," not in found.text  # of a tensor whose rule is another
    assert differ.compare(rules[0], rules[0], n) is None
    assert differ.compare(rules[1], rules[1], n) is None


OF_OPTAX = {
    "AMSGrad": (lambda p: torch.optim.Adam(p, 1e-3, amsgrad=True),
                lambda optax: optax.chain(optax.scale_by_amsgrad(), optax.scale(-1e-3)),
                "largest square (AMSGrad) of corrected squares, for of squares as they are"),
    "Adagrad": (lambda p: torch.optim.Adagrad(p, 1e-2, initial_accumulator_value=0.1),
                lambda optax: optax.adagrad(1e-2, eps=1e-10),
                "eps is inside the root, for outside the root"),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_OPTAX)
def test_what_optax_does_otherwise_is_said(name: str) -> None:
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
    theirs, ours, said = OF_OPTAX[name]
    rules = solve.find_rules(history(lambda: by_torch(theirs)))
    with jax.enable_x64(True):
        other = solve.find_rules(history(lambda: by_optax(ours(optax))), tuple(rules))
    found = differ.compare(rules, other, by_optax=True)
    assert found and found.text == said
