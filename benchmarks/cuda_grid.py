"""`python -m benchmarks.cuda_grid`: JAX beside PyTorch over policies and remat, without a GPU.

GPT-2, 8 sequences a step, as compiled (JAX) and traced (PyTorch) for an H100 and a T4: peak memory,
bytes moved, and what breaks a rule. Prints a table; minutes. Needs the extra [aot].
"""

import sys
from contextlib import closing

from benchmarks.experiments.outcome import markdown
from lockstep import twin
from lockstep.compile import rules, targets
from lockstep.compile.ask import Compiler
from lockstep.config import from_flags
from lockstep.exits import DONE, FAILED, exit_status
from lockstep.flags import Parser
from lockstep.parity.matrix import FACTORS

POLICIES = {"h100": ("bf16", "fp16", "fp32", "tf32"), "t4": ("fp16", "fp32")}
HEAD = ["device, policy, remat", "peak in GB, JAX", "PyTorch", "JAX over PyTorch",
        "moved in GB, JAX", "PyTorch"]  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    """The command line; status 1 if a program breaks a rule."""
    Parser(prog="python -m benchmarks.cuda_grid", description=__doc__).parse_args(argv)
    rows, wrong = [], []
    with closing(Compiler("jax")) as jax, closing(Compiler("torch")) as torch:
        compilers = dict(zip(twin.MODULES, (jax, torch), strict=True))
        for device, policies in POLICIES.items():
            for policy in policies:
                for remat in FACTORS["remat"]:
                    flags = {"model": "gpt2", "policy": policy, "remat": remat, "batch_size": 8}
                    config = from_flags(flags, accelerator=True)
                    found = {f: c.program(config, device) for f, c in compilers.items()}
                    a, b = found.values()
                    name = f"{device}, {policy}, {remat}"
                    figures = (a.peak / 1e9, b.peak / 1e9, a.peak / b.peak)
                    moved = (f"{each.moved / 1e9:.1f}" for each in (a, b))
                    rows.append([name, *(f"{figure:.2f}" for figure in figures), *moved])
                    target = targets.find(device)
                    wrong += [
                        f"{framework}, {name}: {line}"
                        for framework, program in found.items()
                        for line in rules.violations(program, config, target)
                    ]
                    print(*rows[-1], sep=", ", file=sys.stderr, flush=True)
    print(markdown(HEAD, rows))
    print(*wrong, sep="\n")
    return FAILED if wrong else DONE


if __name__ == "__main__":
    sys.exit(exit_status(main))
