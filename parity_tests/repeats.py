"""What the default suite leaves out, for its time.

`REPEATS` are for --full: each repeats what another test guards. A planted bug is among them nowhere
but in `check/test_twins.py`, where the ladder catches it. `REST` is guarded by nothing else:
`make test-rest` runs it, and nothing but it, by --rest; so does CI.
"""

import re

import pytest

# Of a test's id without the folder: what is left out, and what guards the same, by default where
# nothing else is said.
REPEATS = {
    r"test_compile.py::test_compiled_equals_eager\[(tiny-(sublayer|block|dots)"
    r"|gpt2-(none|sublayer|sqrt|dots))\]":
        "tiny-sqrt, and tiny-none and gpt2-block in make test-rest",
    r"test_learning.py::test_validation_loss_falls.*-(fp64|fp32|tf32)\]": "bf16 and fp16",
    r"test_peers_bare.py::test_the_curve_is_ours\[.*-fp32-": "fp64, and bf16 in make test-rest",
    r"test_peers_hf.py::test_the_curve_is_ours\[.*-(tiny-bf16|gpt2-fp32)-":
        "fp64, and gpt2 in bf16, in make test-rest",
    r"test_peers_hf_runner.py::test_evaluation_is_ours\[.*-tiny-": "gpt2",
    r"test_peers_hf_loop.py::test_compiled_equals_eager\[accelerate": "hf-trainer",
    r"test_experiments.py::test_(flushed|small).*\[jax": "torch",
    r"test_islands.py::test_the_ladder_with_islands\[(\*.*-(bf16-2|fp64-3)|blocks.*-fp64-3)\]":
        "rung 2 in fp64, rung 3 in bf16, in make test-rest",
    r"test_islands.py::test_islands_and_no_others.*\[jax-.*-gpt2\]": "tiny",
    r"test_second_pair.py::test_the_second_pair_climbs\[(curves|one step|accumulation)-bf16\]":
        "fp64 on those rungs, bf16 on the first, in make test-rest",
    r"test_second_pair.py::test_the_second_pair_climbs\[gradients-fp(32|16)\]":
        "fp64 and bf16, in make test-rest",
    r"test_remat.py::test_gradients_are_bitwise_equal\[jax-.*scan": "unrolled layers, and rung 6",
    r"test_rounding.py::test_with_nothing_rounded_it_is_wide\[(jax-gpt2|.*tf32|.*torch-tiny)":
        "the other policies and families",
    r"test_nonfinite.py::test_the_first_grad.*\[(the same, (fp32|bf16)|in the middle, fp16)-jax":
        "fp64 and fp16 at the head",
    r"test_nonfinite.py::test_a_run_that_diverges\[fp32\]": "bf16",
    r"test_handover.py::test_the_loss_scale_is_handed_over\[with a scale that has grown":
        "after a skipped step",
    r"test_checkpoint_torn.py::test_a_kill_at_any_moment.*-2\]": "the first seed",
    r"check/test_twins.py::test_the_first_root_is_the_mutant\[(?!norm-eps)":
        "one in a module; the ladder",
    r"test_envelope.py::test_the_twins_against_their_noise\[fp32\]": "bf16, in make test-rest",
    r"test_ladder.py::test_a_long_run_stays_one_curve\[gpt2\]": "tiny, in make test-rest",
    r"test_ports.py::test_(a_port.*gpt_jax|ports_of.*(nnx|lockstep)|a_resnet_in|a_llama_through.*haiku)":
        "ports in Linen, plain JAX and Equinox, two of them in make test-rest",
    r"test_lesson.py::test_every_cell_runs": "the results that the page shows are the record's",
    r"test_lesson.py::test_a_cell_that_fails_is_seen\[(?!!exit)": "a command that fails",
    r"test_kills.py::test_a_run_killed_again.*\[(jax|torch)": "the fake",
}  # fmt: skip


# The same: what is left to `make test-rest`, and what of its kind stays.
REST = {
    r"test_fuzz.py::test_reader\[(ckpt|parquet|plan|rows)\]": "a bug planted in each reader",
    r"test_ladder.py::test_rung\[(fp64-(block-4-gpt2-unroll-data=2,|sqrt-1-tiny-scan-fsdp)|(bf|fp)16.*=2-11)":
        "rung 11 of documents in fp64 on data=2",
    r"test_ladder.py::test_rung\[(nvfp4|mxfp8|fp8-(dots|none|rowwise).*-(6|8|11)\]|fp8-delayed)":
        "fp8 on rung 3, and a bug of fp8-delayed",
    r"test_ladder.py::test_rung\[(tf32.*-(6|8)|bf16-dots-4.*-(8|10)|fp32-block.*-([124-9]|10)"
    r"|(bf16-dots-1|fp16-none)-.*-([124-79]|10)|fp16-none.*-8|fp16-sublayer.*-9|bf16.*-grouped-2"
    r"|fp64-(dots|sublayer).*-([12]|[457-9]|10)|fp64-none-1.*-(8|9|10))\]":
        "the same rungs by another row of the policy, or in fp64; each row on rung 3",
    r"ladder/test_power.py::test_caught\[(mean-over-devices-twice|reduced-(every|in)|last-micro-batch-not"
    r"|same-(rows|masks)-on|rows-shifted|moments-of-one|(finite|scales?|evaluated)-.*one-rank|weights-(not|of)-)":
        "sum-over-devices, norm-of-one-shard, mean-of-rank-means",
    r"ladder/test_power.py::test_harmless_on_a_mesh": "rung 11",
    r"ladder/test_power.py::test_caught\[(scale-of-another|copy-with-another|first-layer-in-fp8|block-rounded"
    r"|never-rounded-up|draws-of|drawn-without|e4m3-gradients-in|output-not-scaled-in|amaxes-(?!recorded-twice\]))":
        "e4m3-gradients, output-not-scaled, amaxes-recorded-twice, all in torch",
    r"test_ranks.py::test_(who_is|a_rank_that|a_launcher|two_launchers|a_process_reads)":
        "what outlives process 0, counts that stand still, and parts of a file",
    r"runs/test_mesh.py::test_a_run_is_one_curve_on_any_mesh": "rung 11; a hand-over on one device",
    r"test_learning.py::test_validation_loss_falls.*-(nvfp4|mxfp8|fp8-)": "bf16, fp16 and fp8",
    r"test_compile.py::test_compiled_equals_eager\[(tiny-none|gpt2-block)": "tiny-sqrt",
    r"test_compile.py::test_narrow_formats_are_traced_too": "the formats, uncompiled",
    r"test_runs.py::test_a_run_stopped_again_and_again": "test_kills' fake, and rung 10",
    r"test_second_pair.py::": "the ladder of the first",
    r"check/test_twins.py::test_(the_first_root|equal_twins)": "a port's; the ladder",
    r"test_ports.py::test_(a_port|ports_of|a_resnet|a_llama_of)": "a port's bugs; one in Equinox",
    r"check/test_command.py::test_(a_map|a_known|a_port|each_program)": "what the command calls",
    r"check/test_mutants.py::test_a_(bug_is_named_first_with_its_cause|rewrite_is_equal)\[(resnet|conv)":
        "a GPT's",
    r"test_untrusted.py::test_the_deepest_model": "limits on what is read, by each reader",
    r"test_ladder.py::test_a_long_run_stays_one_curve\[tiny\]": "rung 8",
    r"test_remat.py::test_gradients_are_bitwise_equal\[jax-.*unroll": "rung 6, and torch's",
    r"test_roles.py::test_every_dtype_is_its_role_s\[jax-gpt2": "jax-tiny, and torch-gpt2",
    r"test_peers_bare.py::test_a_difference_is_called_different": "Hugging Face's peers",
    r"test_peers_hf.py::test_the_curve_is_ours": "the bare peers' curves",
    r"test_peers_bare.py::test_the_curve_is_ours\[.*-(bf16-|fp64-1)": "fp64",
    r"test_growth.py::test_(memory_follows|sqrt_that_runs|jax_keeps)":
        "rung 6, and its bug sqrt-runs-block",
    r"test_cost.py::test_both_count_the_same_matmuls\[gpt2": "tiny",
    r"test_envelope.py::test_the_twins_against_their_noise\[bf16": "rung 8 in bf16",
    r"test_benchmarks.py::test_a_cell_writes_what_the_report_needs\[torch": "jax",
    r"test_handover.py::test_ten_hand_overs": "rung 10",
    r"test_token_weights.py::test_micro_batches_are_one_batch\[3": "1",
    r"ladder/test_power.py::test_caught\[(lora-.*|base-trained)-in-jax\]": "the same in torch",
    r"test_islands.py::test_the_ladder_with_islands": "islands' dtypes, and bugs of islands",
    r"test_module_formats.py::test_the_ladder_with_formats\[(?!fp64-3\])": "rung 3 in fp64",
    r"test_scaled_formats.py::test_the_ladder_over_float16\[[1348]": "rung 7",
    r"test_best_islands.py::test_it_is_as_good_as": "the knapsack, by all subsets",
    r"test_experiments.py::test_nvfp4_s_gradients_are_rounded_to_the_nearest": "the recorded rows",
    r"test_gradients.py::test_the_ladder_with.*\[(fp64-([68]|.*-11)|fp16)": "rung 3 in fp64",
    r"ladder/test_power.py::test_caught\[(formats-ignored|format-of-next|first-pattern-wins\]|forward-in-gradients"
    r"|gradients-in-compute-(in-jax|on-ranks))": "first-pattern-wins-in-jax, gradients-in-compute",
}  # fmt: skip


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what repeats and the rest; with --rest all else.

    Raises:
        pytest.UsageError: a whole file was collected, and a pattern for it fits nothing.
    """
    whole = not config.getoption("keyword") and not any("::" in a for a in config.args)
    files = {item.nodeid.partition("::")[0] for item in items}
    for pattern in [*REPEATS, *REST]:
        file = "/" + pattern.partition("::")[0]
        if whole and any(path.endswith(file) for path in files) and not _fits(pattern, items):
            raise pytest.UsageError(f"parity_tests/repeats.py: {pattern} fits no test; mend it")
    repeats, rest = left_out(items)
    left = {*items} - rest if config.getoption("--rest") else repeats | rest
    if left and not any("::" in argument for argument in config.args):
        config.hook.pytest_deselected(items=list(left))
        items[:] = [item for item in items if item not in left]


def left_out(items: list[pytest.Item]) -> tuple[set[pytest.Item], set[pytest.Item]]:
    """What repeats, and the rest."""
    repeats, rest = ({i for each in of for i in _fits(each, items)} for of in (REPEATS, REST))
    return repeats, rest - repeats


def _fits(pattern: str, items: list[pytest.Item]) -> list[pytest.Item]:
    return [item for item in items if re.search(pattern, item.nodeid)]
