"""Every planted bug is caught in the rung that should catch it, and nothing else is a bug."""

from contextlib import closing
from typing import Any

import numpy as np
import pytest

from lockstep.data.batch import blank_window
from lockstep.judge.verdict import Verdict, check_bound
from lockstep.parity import catalogue, power
from lockstep.parity.catalogue import BUGS, REWRITES, Bug
from lockstep.parity.ladder import RUNGS, WORLDS, climb
from lockstep.parity.side import Side
from lockstep.parity.specificity import PARTS, AlarmRecord, cases
from lockstep.parity.toy import start, toy
from mutants import jax_rewrites, torch_rewrites
from mutants.patch import planted
from parity_tests.tiers import tier

REWRITTEN: dict[str, Any] = {
    "jax": jax_rewrites.REWRITES,
    "torch": torch_rewrites.REWRITES,
}

# One for each stage of the step, in the least program: `make quick`.
STAGES = {
    "targets-shifted": "the rows", "norm-eps": "the model", "label-smoothing": "the loss",
    "gradient-stopped-at-norm": "the backward pass", "loss-not-divided": "accumulation",
    "no-unscale": "the loss scale", "no-clip": "clipping", "eps-inside-root": "the optimizer",
    "schedule-off-by-one": "the schedule",
}  # fmt: skip
# A mesh, a narrow format, an adapter, half precision and gradients in a dtype of their own need
# programs that no other test compiles. Of the bugs of each family these are in `make test`.
OF_FAMILIES = {
    "sum-over-devices", "norm-of-one-shard", "mean-of-rank-means",
    "amaxes-of-skipped-step", "first-pattern-wins-in-jax", "gradients-in-compute",
    "lora-unscaled", "mean-over-padding", "norms-in-bfloat16", "dropout-redrawn",
}  # fmt: skip


def is_dear(bug: Bug) -> bool:
    """Says if a bug needs a program of its own in JAX: more than torch's, and than one step's."""
    plain = bug.framework == "torch" and not bug.flags and bug.rung <= 5
    return not plain and bug.name not in {*STAGES, *OF_FAMILIES}


@tier("quick", guard="a bug for each stage of the step", where=lambda bug: bug.name in STAGES)
@tier("rest", guard="a bug of each stage and family", where=is_dear)
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_caught(bug: Bug, device: str, sides: tuple[Side, Side]) -> None:
    others = {side.framework: side for side in sides}
    rung = RUNGS[bug.rung - 1]
    verdicts = power.examine(bug, others, device, [rung])
    assert verdicts == {str(rung.number): "different"}  # a crash would be no catch


# One bug for each distinct rung and flags.
CONTROLS = {power.control_name(bug): bug for bug in reversed(BUGS)}
# Semantics-preserving variants of what several devices do.
WORLD_REWRITES: dict[str, tuple[str, ...]] = {
    "jax": ("devices-reversed",),
    "torch": ("small-buckets", "reduced-with-every-micro-batch"),
}


@tier("rest", guard="the rung in rows of the matrix")
@pytest.mark.parametrize("control", CONTROLS, ids=lambda control: CONTROLS[control].name)
def test_the_sound_pair_is_equal_where_a_bug_is_planted(
    control: str, device: str, sides: tuple[Side, Side]
) -> None:
    """Or the flags, not the bug, were what is different."""
    others = {side.framework: side for side in sides}
    assert power.examine_sound(CONTROLS[control], others, device) is Verdict.EQUAL


def test_every_bug_has_its_control() -> None:
    for bug in BUGS:
        stands = CONTROLS[power.control_name(bug)]
        assert (stands.rung, stands.flags) == (bug.rung, bug.flags)
    assert len(CONTROLS) < len(BUGS)


def test_a_bug_counts_only_beside_an_equal_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power, "healthy", dict)
    monkeypatch.setattr(power, "examine", lambda *given: {"2": "different"})
    for verdict in Verdict:
        said = list[str]()
        monkeypatch.setattr(power, "examine_sound", lambda *given, verdict=verdict: verdict)
        assert power.run(["norm-eps"], "cpu", None, said.append) is (verdict is Verdict.EQUAL)
        assert (f"says {verdict} of the sound pair" in said[-1]) is (verdict is not Verdict.EQUAL)


def test_the_control_sees_a_pair_that_is_not_sound(sides: tuple[Side, Side]) -> None:
    """A twin that is wrong by itself, under the flags of another bug."""
    jax, torch = sides
    with closing(torch.mutant("softmax-scale=0.01")) as wrong:
        others = {"jax": jax, "torch": wrong}
        assert power.examine_sound(catalogue.BY_NAME["erf-gelu"], others, "cpu") != "equal"


@pytest.mark.parametrize("name", ["softmax-in-compute", "format-of-next-module"])
def test_a_bug_stands_in_fast_numerics(name: str) -> None:
    """Which cut attention's queries into blocks, and whose kernels take no format."""
    bug = catalogue.BY_NAME[name]
    told: dict[str, Any] = {"context": 128, "autotune": "attention=blocks"}
    config = toy(**bug.flags, numerics="fast", **told)
    with planted(bug):
        loss, _ = start(bug.framework, config).loss_and_grads(blank_window(config).select(0))
    assert np.isfinite(loss)


@tier("rest", guard="rung 11")
@pytest.mark.parametrize(
    ("framework", "rewrite"),
    [(framework, name) for framework, names in WORLD_REWRITES.items() for name in names],
)
def test_harmless_on_a_mesh(framework: str, rewrite: str, sides: tuple[Side, Side]) -> None:
    others = {side.framework: side for side in sides}
    with closing(others[framework].mutant(rewrite)) as changed:
        case = power.against(changed, others, {"mesh": "data=2", "n_layer": 1}, "cpu")
        assert climb(RUNGS[WORLDS - 1], case).verdict is Verdict.EQUAL


@tier("rest", guard="the same rungs of the sound pair")
@pytest.mark.parametrize(
    ("framework", "rewrite"),
    [
        ("jax", "attention-by-vmap"),
        ("jax", "loss-by-logsumexp"),
        ("torch", "additive-mask"),
        ("torch", "loss-by-logsumexp"),
    ],
)
def test_harmless_with_masks_and_documents(
    framework: str, rewrite: str, sides: tuple[Side, Side]
) -> None:
    others = {side.framework: side for side in sides}
    row = {"windows": "packed", "n_layer": 1, "accum": 1, "dropout": 0.0}
    with closing(others[framework].mutant(rewrite)) as changed:
        outcome = climb(RUNGS[2], power.against(changed, others, row, "cpu"))
        assert outcome.verdict is Verdict.EQUAL, outcome.worst


def test_a_false_alarm_is_counted() -> None:
    record = AlarmRecord()
    for seed, x, y in (("seed 0", 1.0, 1.2), ("seed 1", 1.7, 1.1)):
        found = [check_bound("ratio", name, size, 1.5) for name, size in (("x", x), ("y", y))]
        record.add(3, "bf16", seed, found)
    cell = record.rungs["3"]["bf16"]
    assert (cell["climbs"], cell["false_alarms"]) == (2, 1)
    worst = cell["worst"]["ratio"]
    assert (worst["figure"], worst["bound"], worst["where"]) == (1.7, 1.5, "seed 1: x")
    assert [alarm["what"] for alarm in record.alarms] == ["seed 1"]


def test_every_seed_is_climbed_and_the_curves_more_often() -> None:
    others = power.healthy()  # of which none is asked, so no process starts
    tried = {part: list(cases(part, 4, 6, others, "cpu")) for part in PARTS}
    rewritten = [(case.config.model.model, case.config.precision.policy, what.split(", ")[1])
                 for what, case, _ in tried.pop("rewrites")]  # fmt: skip
    assert len(rewritten) == len(set(rewritten)) == sum(map(len, REWRITES.values())) * 3
    assert {family for family, *_ in rewritten} == {"tiny", "gpt2"}
    for part, climbed in tried.items():
        assert {case.config.precision.policy for _, case, _ in climbed} == {part}
        rungs = {what.split()[-1]: len(rungs) for what, _, rungs in climbed}
        curves = {} if part == "fp64" else dict.fromkeys("45", 1)
        assert rungs == dict.fromkeys("0123", len(RUNGS)) | curves


def test_tiers_name_bugs_that_are_there() -> None:
    assert {*STAGES, *OF_FAMILIES} <= catalogue.BY_NAME.keys()
    assert not any(is_dear(catalogue.BY_NAME[name]) for name in {*STAGES, *OF_FAMILIES})


@pytest.mark.parametrize("framework", REWRITTEN)
def test_the_twins_have_the_variants_that_are_listed(framework: str) -> None:
    assert tuple(REWRITTEN[framework]) == (*WORLD_REWRITES[framework], *REWRITES[framework])
    assert not {*REWRITTEN[framework]} & {bug.name for bug in BUGS if bug.framework == framework}


def test_names_of_bugs_are_unique() -> None:
    assert len(catalogue.BY_NAME) == len(BUGS)


def test_every_bug_is_planted_in_what_exists() -> None:
    for bug in BUGS:
        bug.make()
