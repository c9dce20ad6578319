"""Simulates other machines on this one: limits on instructions, threads, another JAX.

XLA, ATen, oneDNN and MKL choose their kernels, and with them the order of their sums, by what the
CPU has. ATen takes a limit for what there is: above that of this CPU it would crash.
"""

from lockstep.provenance import cpu

# A family of instructions -> what each library calls it.
XLA_ISA = {"sse": "SSE4_2", "avx": "AVX", "avx2": "AVX2", "avx512": "AVX512"}
ATEN = {"sse": "default", "avx": "default", "avx2": "avx2", "avx512": "avx512"}
ONEDNN = {"sse": "SSE41", "avx": "AVX", "avx2": "AVX2", "avx512": "AVX512_CORE"}
MKL = {"sse": "SSE4_2", "avx": "AVX", "avx2": "AVX2", "avx512": "AVX512"}


def limit(isa: str, threads: int) -> dict[str, str]:
    """Makes the environment in which the best instructions are of one family."""
    limits = {
        "XLA_FLAGS": f"--xla_cpu_max_isa={XLA_ISA[isa]}",
        "ATEN_CPU_CAPABILITY": ATEN[isa],
        "ONEDNN_MAX_CPU_ISA": ONEDNN[isa],
        "DNNL_MAX_CPU_ISA": ONEDNN[isa],
        "MKL_ENABLE_INSTRUCTIONS": MKL[isa],
    }
    return {**limits, **cores(threads)}


def cores(threads: int) -> dict[str, str]:
    """Sets the number of threads, which sleep while they wait.

    More spinning threads than cores would take all the time. By default MKL takes no more threads
    than cores, and torch no more than MKL.
    """
    counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NPROC"), str(threads))
    return counts | {"MKL_DYNAMIC": "FALSE", "OMP_WAIT_POLICY": "PASSIVE"}


# By name: "avx2-4" has four threads. What the frameworks' processes have in their environment.
MACHINES = {f"{isa}-{threads}": limit(isa, threads) for isa in XLA_ISA for threads in (1, 2, 4)}
ANOTHER_JAX = "another-jax"
NEEDED = {"avx2": "avx2", "avx512": "avx512f"}  # all else every x86 has that runs the frameworks


def lacking(name: str) -> str:
    """Names what a machine has and this CPU has not; "" if it can be simulated here."""
    flag = NEEDED.get(name.partition("-")[0], "")
    return "" if flag in (cpu()["flags"] or ()) else flag
