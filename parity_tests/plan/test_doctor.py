"""`lockstep doctor`: each fault of a made-up machine is found, with its remedy, and it alone."""

import dataclasses
import os
import re
import tomllib
from typing import Any

import pytest

from lockstep.cli import commands
from lockstep.config.policy import POLICIES, resolve
from lockstep.doctor import command, machine, policies, report, rules
from lockstep.doctor.facts import DeviceReport, Facts, Framework, Machine
from lockstep.doctor.policies import EMULATED, NATIVE, UNKNOWN, UNSUPPORTED
from lockstep.formats.table import native_recipes
from lockstep.process import ROOT, SPINS, WAITING, wait_briefly

GIB = 2**30
SIDES = ("jax", "torch")


def gpu(name: str, major: int, minor: int) -> DeviceReport:
    return DeviceReport(
        name=name, platform="cuda", capability=(major, minor), total=40 * GIB, free=39 * GIB
    )


A100, T4, V100 = gpu("A100", 8, 0), gpu("T4", 7, 5), gpu("V100", 7, 0)
CPU = DeviceReport(name="cpu")
FAST = {"float32": 1.0, "bfloat16": 0.3, "float16": 0.3}
KERNELS = ["sm_70", "sm_80", "sm_90", "compute_90"]

HEALTHY = Facts(
    machine=Machine(
        system="Linux x86_64", python="3.12.1", cores=8, driver="570.86.15", gpus=(A100,),
        packages={"jax": "0.12.0.1", "jaxlib": "0.12.0", "jax-cuda12-plugin": "0.12.0",
                  "torch": "2.10.0", "nvidia-nccl-cu12": "2.27.5", "nvidia-cudnn-cu12": "9.10.2"},
        environment={},
    ),
    frameworks={
        "jax": Framework(name="jax", devices=(A100,), cuda={"version": "12.9"}),
        "torch": Framework(name="torch", devices=(A100,), cuda={
            "version": "12.8", "kernels": KERNELS, "claims_bfloat16": True}),
    },
)  # fmt: skip


def with_machine(facts: Facts = HEALTHY, **changes: Any) -> Facts:
    for name in ("packages", "environment"):
        if name in changes:
            changes[name] = getattr(facts.machine, name) | changes[name]
    return dataclasses.replace(facts, machine=dataclasses.replace(facts.machine, **changes))


def with_framework(name: str, facts: Facts = HEALTHY, **changes: Any) -> Facts:
    new = dataclasses.replace(facts.frameworks[name], **changes)
    return dataclasses.replace(facts, frameworks=facts.frameworks | {name: new})


def on(device: DeviceReport, facts: Facts = HEALTHY) -> Facts:
    """Both frameworks on another device."""
    seconds = FAST if device.platform == "cpu" else {}
    for name in SIDES:
        facts = with_framework(name, facts, devices=(device,), matmul_seconds=seconds)
    return with_machine(facts, gpus=(device,) if device.platform == "cuda" else ())


WITHOUT_GPU = with_machine(on(CPU), driver="")


def environment(**variables: str) -> Facts:
    return with_machine(environment=variables)


def broken(fault: str, error: str) -> Facts:
    return with_framework("torch", fault=fault, error=error, devices=())


SLOW = FAST | {"float16": 200.0}

# fault -> facts, severity, words of the finding, words of the remedy
FAULTS: dict[str, tuple[Facts, str, str, str]] = {
    "torch missing": (broken("missing", "No module named 'torch'"),
        "error", "torch does not start: No module", r"pip install 'lockstep-gpt\[train\]'"),
    "no device": (with_machine(with_framework("jax", devices=(), unread={
            "devices": "RuntimeError: Unable to initialize backend 'tpu'", "matmul_seconds": "x"}),
            environment={"JAX_PLATFORMS": "tpu"}),
        "error", "finds no device: RuntimeError: Unable", "unset JAX_PLATFORMS"),
    "a fact unread": (with_framework("torch", unread={"cuda": "OSError: libcudnn"}),
        "warning", "torch does not report its cuda: OSError", "torch_ref.inspect.probe shows"),
    "old torch": (with_machine(packages={"torch": "2.6.0+cu124"}),
        "warning", "torch 2.6.0.* is not", "'torch>=2.9,<3.0'"),
    "new jax": (with_machine(packages={"jax": "0.13.0"}),
        "warning", "jax 0.13.0 is not a version", "'jax>=0.10,<0.13'"),
    "driver does not answer": (with_machine(driver_error="couldn't communicate"),
        "warning", "nvidia-smi fails: couldn't", "reboot.*--gpus all"),
    "hidden by JAX_PLATFORMS": (with_framework("jax", environment(JAX_PLATFORMS="cpu"),
                                               devices=(CPU,)),
        "warning", "jax runs on the CPU .* JAX_PLATFORMS=cpu hides", "unset JAX_PLATFORMS"),
    "JAX without CUDA": (with_framework("jax", devices=(CPU,), cuda={}),
        "warning", "jax runs on the CPU .* installed without CUDA", "cuda12"),
    "unseen for its own reason": (with_framework("jax", devices=(CPU,), stderr="cuDNN is outdated"),
        "warning", "jax runs on the CPU .* cuDNN is outdated", "jax_impl.inspect.probe shows"),
    "no kernels": (with_framework("torch", cuda={"kernels": ["sm_90", "compute_90"]}),
        "error", "compiled for sm_90, compute_90", "another CUDA"),
    "torch claims bfloat16": (on(T4), "warning", "claims bfloat16, but .* 7.5", "--policy fp16"),
    "TF32 switched off": (environment(NVIDIA_TF32_OVERRIDE="0"),
        "warning", "NVIDIA_TF32_OVERRIDE=0 overrides", "unset NVIDIA_TF32_OVERRIDE"),
    "oneDNN in XLA": (with_machine(WITHOUT_GPU, environment={"XLA_FLAGS": "--x_onednn=1"}),
        "warning", "wrong gradients", "unset XLA_FLAGS"),
    "slow float16": (with_framework("jax", WITHOUT_GPU, matmul_seconds=SLOW),
        "warning", "jax multiplies float16 200 times slower", "another policy"),
    "no loopback": (with_machine(network="no process reaches a port on 127.0.0.1 (denied)"),
        "warning", "several processes cannot meet: .*127.0.0.1", "/etc/hosts.*GLOO_SOCKET_IFNAME"),
    "a rank left over": (environment(WORLD_SIZE="4", RANK="0"),
        "warning", "WORLD_SIZE=4 without LOCAL_RANK, MASTER_ADDR", "unset WORLD_SIZE"),
    "a process left over": (environment(JAX_NUM_PROCESSES="2"),
        "warning", "JAX_NUM_PROCESSES=2 without JAX_PROCESS_ID", "--coordinator"),
    "no NCCL": (with_framework("torch", collectives=["gloo"]),
        "warning", "torch has no nccl", "reinstall torch"),
    "no gloo": (with_framework("jax", collectives=["nccl"]),
        "warning", "jax has no gloo", "one device"),
}  # fmt: skip


@pytest.mark.parametrize("facts", [HEALTHY, WITHOUT_GPU], ids=["cuda", "cpu"])
def test_a_healthy_machine_has_no_findings(facts: Facts) -> None:
    assert rules.findings(facts) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found_with_its_remedy(fault: str) -> None:
    facts, severity, what, remedy = FAULTS[fault]
    (found,) = rules.findings(facts)
    assert found.severity == severity
    assert re.search(what, found.what)
    assert re.search(remedy, found.remedy)


def test_a_framework_that_fails_in_an_old_version_is_to_be_updated() -> None:
    facts = with_machine(broken("import", "no attribute"), packages={"torch": "2.5.1"})
    found = {each.what: each.remedy for each in rules.findings(facts)}
    assert len(found) == 2
    assert found["torch does not start: no attribute"].startswith("pip install 'torch>=2.9,<3.0'")
    assert "torch 2.5.1 is not a version that the twins support" in found


@pytest.mark.parametrize("value", ["", "-1"])
def test_cuda_visible_devices_hides_a_gpu_from_both(value: str) -> None:
    facts = with_machine(on(CPU), environment={"CUDA_VISIBLE_DEVICES": value}, gpus=(A100,))
    found = rules.findings(facts)
    assert [f"CUDA_VISIBLE_DEVICES={value} hides it" in f.what for f in found] == [True, True]
    assert {f.remedy for f in found} == {"unset CUDA_VISIBLE_DEVICES"}


def test_cuda_settings_do_not_matter_on_a_cpu() -> None:
    given = {"NVIDIA_TF32_OVERRIDE": "0", "CUDA_VISIBLE_DEVICES": ""}
    assert rules.findings(with_machine(WITHOUT_GPU, environment=given)) == []


def states(device: DeviceReport, **more: Any) -> dict[str, str]:
    """Returns what torch can do on a device, by policy."""
    framework = Framework(name="torch", devices=(device,), **more)
    return {name: policies.ability(roles, framework).state for name, roles in POLICIES.items()}


NARROW = [name for name, roles in POLICIES.items() if roles.recipe]
BF16 = ("bf16", "bf16-stream")


@pytest.mark.parametrize(("device", "emulated"), [
    (A100, set()),
    (gpu("unheard of", 13, 1), set()),
    (T4, {"tf32", *BF16}),  # whatever torch.cuda.is_bf16_supported says
    (V100, {"tf32", *BF16}),
    (gpu("Maxwell", 5, 2), {"tf32", *BF16, "fp16"}),
    (gpu("T4 by name, H100 by capability", 9, 0), set()),
    (gpu("B200", 10, 0), set()),
])  # fmt: skip
def test_the_capability_decides(device: DeviceReport, emulated: set[str]) -> None:
    found = states(device, cuda={"claims_bfloat16": True})
    narrow = {name for name in NARROW if found.pop(name) == NATIVE}  # the others by hand
    assert narrow == native_recipes(device.capability)
    assert {name for name, state in found.items() if state == EMULATED} == emulated
    assert {found[name] for name in found.keys() - emulated} == {NATIVE}


def test_on_a_cpu_the_time_of_a_matmul_decides() -> None:
    found = states(CPU, matmul_seconds=FAST)
    assert {found.pop(name) for name in NARROW} == {EMULATED}
    assert found == {
        "fp64": NATIVE, "fp32": NATIVE, "tf32": EMULATED, "fp16": NATIVE,
        **dict.fromkeys(BF16, NATIVE),
    }  # fmt: skip
    slow = states(CPU, matmul_seconds=FAST | {"bfloat16": 1.15})
    assert (slow["bf16"], slow["fp16"]) == (EMULATED, NATIVE)
    assert states(CPU)["bf16"] == UNKNOWN


def test_nothing_is_said_of_what_is_not_known() -> None:
    rocm = DeviceReport(name="MI300X", platform="rocm")
    assert set(states(rocm).values()) == {UNKNOWN}
    found = list(rules.of_policy("bf16", policies.table(on(rocm), "bf16")["bf16"]))
    assert {f.severity for f in found} == {"warning"}


def test_a_tpu_multiplies_bfloat16() -> None:
    found = states(DeviceReport(name="TPU v5 lite", platform="tpu"))
    assert [*map(found.pop, (*BF16, "fp64"))] == [NATIVE, NATIVE, UNSUPPORTED]
    assert set(found.values()) == {EMULATED}
    assert states(DeviceReport(name="mps", platform="mps"))["fp64"] == UNSUPPORTED


def test_kernels_for_the_device() -> None:
    """A binary runs within its major version, PTX on anything later."""

    def lacks(*kernels: str, capability: tuple[int, int] = (8, 9)) -> bool:
        device = gpu("A10 or Ada", *capability)
        cuda = {"kernels": list(kernels)}
        return policies.lacks_kernels(Framework(name="torch", devices=(device,), cuda=cuda))

    assert not lacks("sm_80")
    assert not lacks("sm_70", "compute_70")
    assert not lacks()  # it does not say
    assert lacks("sm_70")
    assert lacks("sm_90", "compute_90", "sm_120")
    assert lacks("sm_89", capability=(8, 6))  # the same major version, but a later minor one
    assert not lacks("sm_86", capability=(8, 6))


def test_a_specs_compute_dtype_decides() -> None:
    spec = "params=bfloat16,compute=bfloat16,output=float32"
    framework = Framework(name="jax", devices=(T4,))
    assert policies.ability(resolve(spec), framework).state == EMULATED


def test_an_override_makes_tf32_float32() -> None:
    table = policies.table(environment(NVIDIA_TF32_OVERRIDE="0"))
    assert {a.state for a in table["tf32"].values()} == {EMULATED}
    assert {a.state for a in table["bf16"].values()} == {NATIVE}


UNABLE = with_framework("torch", on(V100), cuda={"kernels": ["sm_80"]})


@pytest.mark.parametrize(("facts", "flags", "status", "words"), [
    (HEALTHY, "--policy bf16", 0, "no problems found"),
    (HEALTHY, "--policy tf32", 0, "capability 8.0, tensor cores: float16, bfloat16, TF32"),
    (on(T4), "--policy bf16", 0, "warning: --policy bf16 is emulated in jax"),
    (on(T4), "--policy fp16", 0, "capability 7.5, tensor cores: float16;"),
    (on(V100), "--policy tf32", 0, "warning: --policy tf32 is emulated in torch"),
    (WITHOUT_GPU, "--policy tf32", 0, "a CPU has no TF32"),
    (UNABLE, "--policy fp32", 1, "error: --policy fp32 is unsupported in torch"),
    (UNABLE, "", 1, "error: torch is compiled for sm_80"),
    (UNABLE, "--policy fp32 --framework jax", 0, "no problems found"),
    (broken("missing", "No module"), "", 1, "error: torch does not start"),
    (broken("missing", "No module"), "--framework jax", 0, "no problems found"),
])  # fmt: skip
def test_exit_status(
    facts: Facts,
    flags: str,
    status: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(machine, "read", lambda: facts.machine)
    monkeypatch.setattr(command, "ask", lambda name: facts.frameworks[name])
    assert commands.main(["doctor", *flags.split()]) == status
    captured = capsys.readouterr()
    assert words in captured.out + captured.err
    assert max(len(line) for line in captured.out.splitlines() or [""]) <= 80


def test_supported_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wanted = " " + " ".join(project["project"]["optional-dependencies"]["train"])
    for name, (least, below) in rules.SUPPORTED.items():
        assert f" {name}>={policies.version_text(least)}" in wanted
        assert f"<{policies.version_text(below)}" in wanted or below[0] > least[0]


@pytest.mark.parametrize("name", WAITING)
def test_the_report_tells_how_threads_wait(name: str) -> None:
    ours = "GOMP_SPINCOUNT=50000, set by torch_ref.train"
    assert ours in "\n".join(report._machine(environment().machine))
    told = "\n".join(report._machine(environment(**{name: "7"}).machine))
    assert f"{name}=7" in told and ours not in told


@pytest.mark.parametrize("given", [{}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "ACTIVE"}])
def test_threads_wait_as_the_user_has_set(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in WAITING:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    wait_briefly()
    assert {n: os.environ[n] for n in WAITING if n in os.environ} == (given or SPINS)
