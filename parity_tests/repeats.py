"""What the default suite leaves to --full: each of these repeats what another test guards.

A planted bug is left out nowhere but in `check/test_twins.py`, where the ladder catches it.
"""

import re

import pytest

# Of a test's id without the folder: what is left out, and what guards the same by default.
REPEATS = {
    r"test_compile.py::test_compiled_equals_eager\[(tiny-(sublayer|block|dots)"
    r"|gpt2-(none|sublayer|sqrt|dots))\]": "tiny-none, tiny-sqrt and gpt2-block",
    r"test_learning.py::test_validation_loss_falls.*-(fp64|fp32|tf32)\]": "bf16 and fp16",
    r"test_peers_bare.py::test_the_curve_is_ours\[.*-fp32-": "fp64 and bf16",
    r"test_peers_hf.py::test_the_curve_is_ours\[.*-(tiny-bf16|gpt2-fp32)-":
        "fp64, and gpt2 in bf16",
    r"test_peers_hf_runner.py::test_evaluation_is_ours\[.*-tiny-": "gpt2",
    r"test_peers_hf_loop.py::test_compiled_equals_eager\[accelerate": "hf-trainer",
    r"test_benchmarks.py::test_our_two_compute_the_same": "rung 8",
    r"test_experiments.py::test_(flushed|small).*\[jax": "torch",
    r"test_islands.py::test_the_ladder_with_islands\[(\*.*-(bf16-2|fp64-3)|blocks.*-fp64-3)\]":
        "rung 2 in fp64, rung 3 in bf16",
    r"test_islands.py::test_islands_and_no_others.*\[jax-.*-gpt2\]": "tiny",
    r"test_second_pair.py::test_the_second_pair_climbs\[(curves|one step|accumulation)-bf16\]":
        "fp64 on those rungs, bf16 on the first",
    r"test_second_pair.py::test_the_second_pair_climbs\[gradients-fp(32|16)\]": "fp64 and bf16",
    r"test_remat.py::test_gradients_are_bitwise_equal\[jax-.*scan": "unrolled layers, and rung 6",
    r"test_rounding.py::test_with_nothing_rounded_it_is_wide\[(jax-gpt2|.*tf32|.*torch-tiny)":
        "the other policies and families",
    r"test_nonfinite.py::test_the_first_grad.*\[(the same, (fp32|bf16)|in the middle, fp16)-jax":
        "fp64 and fp16 at the head",
    r"test_nonfinite.py::test_a_run_that_diverges\[fp32\]": "bf16",
    r"test_handover.py::test_the_loss_scale_is_handed_over\[with a scale that has grown":
        "after a skipped step",
    r"test_checkpoint_torn.py::test_a_kill_at_any_moment.*-2\]": "the first seed",
    r"check/test_twins.py::test_the_first_root_is_the_mutant\[(?!norm-eps|query-for-key|decay\])":
        "one in a module, one between two, one in the optimizer",
    r"test_ladder.py::test_a_long_run_stays_one_curve\[gpt2\]": "tiny",
    r"test_ports.py::test_(a_port|ports_of|a_resnet|a_llama_through_taps\[haiku|a_llama_of)":
        "bugs of a port in Linen, Equinox",
    r"test_lesson.py::test_every_cell_runs": "the results that the page shows are the record's",
    r"test_lesson.py::test_a_cell_that_fails_is_seen\[(?!!exit)": "a command that fails",
    r"test_kills.py::test_a_run_killed_again.*\[(jax|torch)": "the fake, and test_runs' few",
}  # fmt: skip


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what repeats.

    Raises:
        pytest.UsageError: a whole file was collected, and a pattern for it fits nothing.
    """
    found = {pattern: [i for i in items if re.search(pattern, i.nodeid)] for pattern in REPEATS}
    whole = not config.getoption("keyword") and not any("::" in a for a in config.args)
    files = {item.nodeid.partition("::")[0] for item in items}
    for pattern, fits in found.items():
        file = "/" + pattern.partition("::")[0]
        if whole and not fits and any(path.endswith(file) for path in files):
            raise pytest.UsageError(f"parity_tests/repeats.py: {pattern} fits no test; mend it")
    repeats = {item for fits in found.values() for item in fits}
    if repeats and not any("::" in argument for argument in config.args):
        config.hook.pytest_deselected(items=list(repeats))
        items[:] = [item for item in items if item not in repeats]
