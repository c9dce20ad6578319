"""`lockstep plan`: what it predicts, what it recommends, and that only numbers decide."""

import dataclasses
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from lockstep import devices
from lockstep.cli import commands
from lockstep.cli.trainers import trainer_parser
from lockstep.config import PRESETS, ModelConfig, PrecisionConfig, from_flags
from lockstep.config.policy import POLICIES
from lockstep.errors import UserError
from lockstep.model import flops, params
from lockstep.plan import recommend, roofline, shape, sizes
from lockstep.plan.layers import scans_layers
from lockstep.plan.recommend import choices, rank
from lockstep.plan.setting import CANDIDATES
from parity_tests.plan.plans import setting

GPT2_JSON = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768,
             "n_positions": 1024, "vocab_size": 50304}  # fmt: skip
LLAMA_JSON = {"num_hidden_layers": 16, "num_attention_heads": 16, "hidden_size": 2048,
              "intermediate_size": 5504, "vocab_size": 50304, "max_position_embeddings": 2048,
              "num_key_value_heads": 16, "tie_word_embeddings": False}  # fmt: skip

SMALL = 21e9  # bytes: no row of the 1b model without remat


# --- shapes


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_counts_as_the_trainer_counts(name: str) -> None:
    model = ModelConfig(model=name, **PRESETS[name])
    found = shape.of(name, None)
    assert found.weights == params.count(model)
    blocks = [a for n, a in params.shapes(model).items() if n.startswith("blocks.")]
    others = model.d_model * 2  # at most the last norm's
    assert 0 <= found.block_weights - sum(map(math.prod, blocks)) <= others


def write_json(folder: Path, content: Any) -> str:
    path = folder / "config.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_a_huggingface_config_is_its_preset(tmp_path: Path) -> None:
    for content, preset in ((GPT2_JSON, "gpt2"), (LLAMA_JSON, "1b")):
        found, ours = shape.of(write_json(tmp_path, content), None), shape.of(preset, None)
        same = {f: getattr(ours, f) for f in vars(ours) if f not in ("name", "d_mlp", "weights")}
        assert {f: getattr(found, f) for f in same} == same
        mlp = 3 * found.n_layer * found.d_model * (found.d_mlp - ours.d_mlp)
        assert found.weights == ours.weights + mlp


def test_a_window_is_refused_beyond_it_alone(tmp_path: Path) -> None:
    path = write_json(tmp_path, LLAMA_JSON | {"model_type": "mistral", "sliding_window": 128})
    assert shape.of(path, 128).context == 128
    with pytest.raises(UserError, match="--context 2048: .*window of 128 .*at most 128"):
        shape.of(path, None)


def test_grouped_queries_have_fewer_weights(tmp_path: Path) -> None:
    few = shape.of(write_json(tmp_path, LLAMA_JSON | {"num_key_value_heads": 4}), None)
    assert shape.of(write_json(tmp_path, LLAMA_JSON), None).weights - few.weights == (
        16 * 2 * 2048 * 128 * 12
    )


LIKE_GPT2 = GPT2_JSON | {"n_layer": 2, "n_embd": 96}


@pytest.mark.parametrize(("content", "weights", "words"), [
    (LIKE_GPT2, True, ["--init", "FOLDER"]),
    (LIKE_GPT2, False, ["--model", "gpt2", "--n-layer", "2", "--n-head", "12", "--d-model", "96",
                        "--context", "1024", "--vocab", "50304"]),
    (LLAMA_JSON | {"intermediate_size": 4096}, False, []),
])  # fmt: skip
def test_the_command_of_a_folder_runs(
    content: dict[str, Any], weights: bool, words: list[str], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A trainer takes its config: `--init` where weights are, else sizes; else the flags alone."""
    write_json(tmp_path, content)
    (tmp_path / "model.safetensors").touch() if weights else None
    assert commands.main(["plan", "--model", str(tmp_path), "--device", "a100-80", "--json"]) == 0
    words = [str(tmp_path) if word == "FOLDER" else word for word in words]
    for plan in json.loads(capsys.readouterr().out)["plans"]:
        command = plan["command"]
        module = f"{'jax_impl' if plan['framework'] == 'jax' else 'torch_ref'}.train"
        assert command[: 3 + len(words)] == ["python", "-m", module, *words] or not words
        if not weights and words:
            given = vars(trainer_parser("x").parse_args(command[3:]))
            found = shape.of_model(from_flags(given, accelerator=True).model)
            assert found == dataclasses.replace(shape.of(str(tmp_path), None), name="gpt2")
    if not words:
        assert command[0] == "--policy"


@pytest.mark.parametrize(("name", "near"), [
    ("a100", "did you mean a100-40 or a100-80?"), ("A100-SXM", "did you mean a100-40 or a100-80?"),
    ("rtx-409", "did you mean rtx-4090?"), ("h200-141", "did you mean h200?"),
    ("abacus", "use one of t4, "),
])  # fmt: skip
def test_a_device_that_is_nearly_named(name: str, near: str) -> None:
    with pytest.raises(UserError, match=f"--device {name}: unknown; {re.escape(near)}"):
        devices.find(name)


# --- devices


@pytest.mark.parametrize(
    ("reported", "policy", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989), ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H200", "tf32", 494.5), ("NVIDIA A100-SXM4-40GB", "fp32", 19.5),
        ("Tesla T4", "fp16", 65), ("Tesla T4", "bf16", 8.1), ("NVIDIA L4", "bf16", 121),
        ("NVIDIA B200", "bf16", 2250), ("NVIDIA GeForce RTX 5090", "fp16", 209.5),
        # By units for the format where the device has them, else as what it is widened to
        ("NVIDIA H100 80GB HBM3", "fp8", 1978), ("NVIDIA L4", "fp8-delayed", 242),
        ("NVIDIA A100-SXM4-40GB", "fp8", 19.5), ("NVIDIA B200", "fp8", 4500),
        # Names of others inside a name, and devices that are not in the table
        ("NVIDIA L40S", "bf16", None), ("NVIDIA A10G", "bf16", None), ("cpu", "bf16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None), ("NVIDIA H200", "fp64", None),
        ("NVIDIA GB200", "bf16", None), ("NVIDIA GeForce RTX 5090 D", "bf16", None),
    ],
)  # fmt: skip
def test_peak_by_the_name_that_a_driver_reports(
    reported: str, policy: str, tera: float | None
) -> None:
    found = devices.peak(reported, [POLICIES[policy]])
    assert found == (None if tera is None else pytest.approx(tera * devices.TERA))


def test_the_peak_of_several_formats_is_the_fastest_one_s() -> None:
    all_roles = PrecisionConfig(policy="fp16", formats="blocks=fp8,head=fp32").all_roles
    assert devices.peak("NVIDIA H200", all_roles) == 2 * devices.find("h200").half


# --- the recommendation


def test_no_name_decides() -> None:
    """Another name with the same numbers gets the same answer."""
    model = shape.of("125m", None)
    for device in devices.DEVICES.values():
        for framework in device.frameworks:
            other = dataclasses.replace(device, name="a device of tomorrow")
            mine, theirs = (
                rank(choices(dataclasses.replace(model, name=name), d, framework, 2**17))
                for name, d in (("125m", device), ("x", other))
            )
            assert mine == theirs


@pytest.mark.parametrize(
    ("device", "policy"), [("t4", "fp16"), ("v100", "fp16"), ("a100-40", "bf16"), ("h200", "bf16")]
)
def test_the_policy_is_the_one_that_the_device_has_units_for(device: str, policy: str) -> None:
    best = rank(choices(shape.of("gpt2", None), devices.find(device), "torch", 2**17))[0]
    assert best.setting.policy == policy


def test_remat_is_for_what_does_not_fit() -> None:
    model, device = shape.of("1b", None), devices.find("h200")
    roomy = rank(choices(model, device, "torch", 2**17))[0]
    small = dataclasses.replace(device, memory=SMALL)
    cramped = rank(choices(model, small, "torch", 2**17))[0]
    assert roomy.setting.remat == "none" and cramped.setting.remat != "none"
    assert cramped.seconds > roomy.seconds and cramped.bytes < 0.9 * SMALL
    assert rank(choices(model, dataclasses.replace(device, memory=8e9), "torch", 2**17)) == []


def test_chunks_of_the_loss_are_for_logits_that_do_not_fit() -> None:
    """One row of 8,192 tokens has 2 GB of bfloat16 logits; torch has 12 GB with their gradient."""
    model = dataclasses.replace(shape.of("gpt2", None), context=8192, vocab=131_072)
    for framework, size in (("jax", 4e9), ("torch", 12e9)):
        device = dataclasses.replace(devices.find("h100"), memory=size)
        found = choices(model, device, framework, 8192)
        best = rank(found)[0]
        assert best.setting.loss_chunks == "auto" and best.fits
        assert not any(c.fits for c in found if c.setting.loss_chunks == "1")
        assert "the logits of all rows at once: do not fit" in recommend.reason(
            model, device, best, found
        )
    roomy = rank(choices(model, devices.find("h100"), "torch", 8192))[0]
    assert roomy.setting.loss_chunks == "1"


def test_all_rows_of_a_step_are_taken() -> None:
    for found in choices(shape.of("10m", None), devices.find("t4"), "jax", 100_000):
        assert found.setting.rows * found.setting.accum * 256 >= 100_000


def test_a_step_is_no_faster_than_its_matmuls() -> None:
    for device in devices.DEVICES.values():
        for remat in recommend.REMAT:
            given = setting(remat=remat)
            model = shape.of("gpt2", None)
            multiplied = model.weights - model.looked_up
            flops_of_step = 6 * multiplied * given.rows * model.context
            rate = device.rate(given.roles.compute, given.roles.tf32)
            assert roofline.seconds(model, given, device) > flops_of_step / rate


def test_sizes_that_tensor_cores_do_not_want() -> None:
    """A vocabulary of 50,257 and heads of 60 channels: of 16 bytes neither makes whole rows in half
    precision; heads of 60 do in TF32."""
    model = shape.of_model(ModelConfig(**{**PRESETS["gpt2"], "vocab": 50_257, "head_dim": 60}))

    def check(policy: str, device: str) -> dict[str, Any]:
        return sizes.check(model, setting(policy=policy), devices.find(device))

    uneven = {"head": [60, 64], "V": [50_257, 50_264]}
    assert check("bf16", "h100") == {"multiple": 8, "uneven": uneven}
    assert check("tf32", "a100-40") == {"multiple": 4, "uneven": {"V": [50_257, 50_260]}}
    assert check("fp32", "h100") == check("bf16", "t4") == {}
    assert "V = 50257, use 50264" in sizes.text(check("fp16", "t4"))
    half = setting(policy="bf16")
    even = sizes.check(shape.of("gpt2", None), half, devices.find("h100"))
    assert sizes.text(even).startswith("all sizes are multiples of 8")


def test_what_fits_does_so_at_the_most_that_errors_allow() -> None:
    """Where programs are known to need a quarter more than the plan says, that must fit, too."""
    device, error = devices.find("h200"), {"lowest": -0.2, "highest": 0.0}
    for room, fits in ((1 / 0.9, False), (1.24, False), (1.26, True)):
        small = dataclasses.replace(device, memory=room * 1e10)
        assert recommend.fits(1e10, error, small) is fits
    full = dataclasses.replace(device, memory=1.01e10)
    assert not recommend.fits(1e10, {"lowest": 0.0, "highest": 0.0}, full)


def test_jax_has_its_layers_as_the_trainer_has_them() -> None:
    """In a loop where the recomputed layers of this device's memory do not fit unrolled."""
    device, found = devices.find("h100"), set()
    for name in ("gpt2", "gpt2-medium"):
        for c in choices(shape.of(name, None), device, "jax", 2**19, policies=("tf32", "bf16")):
            s = c.setting
            config = from_flags(
                {"model": name, "policy": s.policy, "remat": s.remat, "batch_size": s.rows,
                 "accum": s.accum, "loss_chunks": s.loss_chunks},
                accelerator=True,
            )  # fmt: skip
            assert s.scanned is scans_layers(config, device.capabilities)
            found.add((s.policy, s.remat != "none", s.scanned))
    assert ("bf16", True, True) in found and ("bf16", True, False) in found
    assert ("bf16", False, True) not in found


# --- the command


@pytest.mark.parametrize("rows", [16, 162])
def test_a_loop_is_asked_for_and_the_rest_left_to_auto(
    rows: int, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--framework", "jax", "--policy", "bf16", "--remat", "block", "--json"]
    words += ["--tokens-per-step", str(1024 * rows), "--micro-batch", str(rows)]
    words += ["--loss-chunks", "1"]
    assert commands.main(["plan", "--model", "gpt2-medium", "--device", "h100", *words]) == 0
    (plan,) = json.loads(capsys.readouterr().out)["plans"]
    (row,) = plan["rows"]
    assert row["fits"] and row["scanned"] is (rows == 162)
    assert ("scan" in plan["command"]) is row["scanned"]


def test_the_command_prints_and_imports_no_framework(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--model", "gpt2", "--device", "H200", "--tokens", "1e10", "--price", "3"]
    assert commands.main(words) == 0
    text = capsys.readouterr().out
    assert text.count("recommended: python -m") == 3
    assert text.count("weights    grads    accum     Adam    activ   logits     work") == 1
    assert "in the unit of --price" in text
    assert "days" in text and max(map(len, text.splitlines())) < 200


def test_the_answer_is_in_the_first_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """One for each framework, and then which programs the comparison is of."""
    assert commands.main(["plan", "--model", "gpt2", "--device", "h200"]) == 0
    jax, torch, compared = capsys.readouterr().out.splitlines()[:3]
    figures = r"\w+: +[\d,]+ tokens/s ± \d+%, MFU \d\d%, [\d.]+ GiB \([\d.]+ to [\d.]+\): "
    for line, module in ((jax, "jax_impl"), (torch, "torch_ref")):
        assert re.match(rf"{figures}python -m {module}\.train --model gpt2 ", line)
    assert torch.endswith(" --compile")
    assert re.search(r"[\d.]+ \(within the errors\) of compiled PyTorch's and [\d.]+ of eager "
                     r"PyTorch's speed", compared)  # fmt: skip
    words = ["plan", "--model", "tiny", "--device", "h200", "--framework", "torch"]
    assert commands.main(words) == 0
    alone, compared, empty = capsys.readouterr().out.splitlines()[:3]
    assert re.search(r"tokens/s at most, MFU \d+%, [\d.]+ GiB \([\d.]+ to [\d.]+\): p", alone)
    assert "compiled PyTorch has " in compared and "of eager PyTorch's speed" in compared
    assert empty == ""


def test_mfu_counts_as_a_run_counts() -> None:
    for name in PRESETS:
        assert shape.of(name, None).flops_per_token == flops.per_token(
            ModelConfig(model=name, **PRESETS[name])
        )


def test_json_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["plan", "--model", "10m", "--device", "t4", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [plan["framework"] for plan in content["plans"]] == ["jax", "torch", "torch"]
    assert [plan["program"] for plan in content["plans"]] == ["jax", "eager", "compiled"]
    assert "fused attention" in content["assumptions"]
    for plan in content["plans"]:
        listed = [(row["policy"], row["remat"]) for row in plan["rows"]]
        assert listed == list(itertools.product(CANDIDATES, recommend.REMAT))
        best = plan["recommended"]
        assert best in plan["rows"]
        assert sum(best["bytes"].values()) == pytest.approx(best["total_bytes"])
        low, high = best["bytes_range"]
        assert low <= best["total_bytes"] <= high and best["seconds_error"] is None
        assert {"relative", "runs", "how"} == plan["errors"]["time"].keys()


def test_what_is_given_is_not_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--micro-batch", "4", "--tokens-per-step", "8192", "--context", "512", "--json"]
    assert commands.main(["plan", "--model", "gpt2", "--device", "t4", *words]) == 0
    for plan in json.loads(capsys.readouterr().out)["plans"]:
        assert {(row["rows"], row["accum"]) for row in plan["rows"]} == {(4, 4)}
        given = " ".join(word for word in plan["command"] if word != "--compile")
        assert given.endswith("--batch-size 4 --accum 4 --remat none --context 512")
    words = ["--devices", "16", "--per-machine", "4", "--link", "pcie", "--inter", "25", "--json"]
    assert commands.main(["plan", "--model", "1b", "--device", "h100", *words]) == 0
    links = json.loads(capsys.readouterr().out)["links"]
    assert links == {"inside": 64e9, "between": 25e9, "per_machine": 4}


def test_what_fits_nowhere_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert commands.main(["plan", "--model", "1b", "--device", "t4", "--memory", "4"]) == 0
    assert "nothing fits" in capsys.readouterr().out
