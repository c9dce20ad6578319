"""Wrong invocations of what `python -m` runs, and what the line must say: see `wrong`."""

from parity_tests.input.wrong import LONG

# module -> words, and what the line must say
MODULES: dict[str, list[tuple[str, list[str]]]] = {
    "benchmarks.run": [
        ("", ["NAME", "--help"]),
        ("nonsense", ["NAME", "nonsense", "smoke"]),
        ("smoke --minutes 0", ["--minutes", "0", "above 0"]),
        ("smoke --minutes x", ["--minutes", "'x'", "number"]),
        ("smoke --minutes nan", ["--minutes", "nan", "above 0"]),
        ("smoke --scale full", ["--scale", "full", "a suite"]),
        ("cpu --device cpu", ["--device", "cpu", "a suite"]),
        ("smoke --out half", ["--out", "half", "is a folder"]),
        ("smoke --out notes.md", ["notes.md", "no file of results"]),
        ("smoke --out notes.md/x", ["--out", "notes.md", "is a file"]),
        (f"smoke --out {LONG}", ["--out", LONG, "name another"]),
        ("policies --scale huge", ["--scale", "huge", "smoke"]),
        ("policies --device tpu", ["--device", "tpu", "cpu"]),
        ("policies --minutes 3", ["--minutes", "3", "drop it"]),
        ("policies --rehearse", ["--rehearse", "drop it"]),
        ("smoke --no", ["--no", "unknown"]),
    ],
    "benchmarks.matmul": [
        ("", ["FRAMEWORK", "--help"]),
        ("keras", ["FRAMEWORK", "keras", "torch"]),
        ("torch --device tpu", ["--device", "tpu", "cuda"]),
        ("torch --size 0", ["--size", "0", "from 2"]),
        ("torch --size 1000000", ["--size", "1000000", "to 32768"]),
        ("torch --out half", ["--out", "half", "is a folder"]),
    ],
    "benchmarks.growth": [
        ("torch", ["--out", "--help"]),
        ("keras --out x.json", ["--framework", "keras", "torch"]),
        ("torch --out notes.md/x.json", ["--out", "notes.md", "is a file"]),
        ("torch --out x.json --device tpu", ["--device", "tpu", "cuda"]),
    ],
    "benchmarks.speed": [
        ("keras", ["OURS", "keras", "torch"]),
        ("--pairs 3", ["--pairs", "3", "at least 20"]),
        ("--pairs x", ["--pairs", "'x'", "whole number"]),
        ("--out half", ["--out", "half", "is a folder"]),
    ],
    "benchmarks.worlds": [
        ("--steps 1", ["--steps", "1", "at least 4"]),
        ("--out notes.md/x", ["--out", "notes.md"]),
    ],
    "benchmarks.startup": [("--turns 0", ["--turns", "0", "at least 1"])],
    "benchmarks.exported": [("stray", ["stray", "not a run"])],
    "benchmarks.resnet_memory": [("stray", ["stray", "--help"])],
    "benchmarks.cuda_grid": [("stray", ["stray", "--help"])],
    "benchmarks.loss_chunks": [
        ("--chunks 0", ["--loss-chunks", "0"]),
        ("--rounds x", ["--rounds", "'x'", "whole number"]),
        ("--rounds 0", ["--rounds", "0", "at least 1"]),
    ],
    "benchmarks.optimizer_state": [
        ("", ["FRAMEWORK", "--help"]),
        ("keras", ["FRAMEWORK", "keras", "torch"]),
        ("torch --out half", ["--out", "half", "is a folder"]),
    ],
    "benchmarks.report": [
        ("", ["FILE", "--help"]),
        ("nowhere", ["nowhere", "holds no cells", "benchmarks.run"]),
        ("spoilt.jsonl", ["spoilt.jsonl", "invalid JSON", "name another"]),
        ("strange.jsonl", ["strange.jsonl", "a row without a name"]),
        ("half stray", ["stray", "--help"]),
    ],
    "benchmarks.measure": [
        ("", ["CELL, NAME, FILE", "--help"]),
        ("{ name x", ["'{'", "invalid JSON", "give JSON"]),
        ("[] name x", ["[]", "give its fields"]),
    ],
    "benchmarks.experiments.work": [
        ("", ["ARM, NAME, FILE", "--help"]),
        ("{ name x", ["'{'", "invalid JSON", "give JSON"]),
        ("[] name x", ["[]", "give its fields"]),
    ],
    "benchmarks.experiments.expected": [
        ("", ["ARMS", "--help"]),
        ("{}", ["ARMS", "'{}'", "no list"]),
        ("[3]", ["3", "give its fields"]),
    ],
    "benchmarks.documents": [("power", ["power", "--help"])],
    "benchmarks.lesson": [("nothing", ["CELL", "nothing", "unknown"])],
    "parity_tests.bugs": [("no-clip", ["no-clip", "--help"])],
    "parity_tests.gate": [
        ("", ["COMMIT", "--help"]),
        ("nonsense", ["COMMIT", "nonsense", "git log"]),
        ("HEAD --curves", ["--curves", "unknown"]),
    ],
    "parity_tests.input.fuzz": [
        ("letters", ["READER", "letters", "checkpoint"]),
        ("--cases 0", ["--cases", "0", "at least 1"]),
        ("--cases many", ["--cases", "'many'", "whole number"]),
        ("--out half", ["--out", "half", "is a folder"]),
    ],
}  # fmt: skip

# as processes, of which one of each front end is enough
PROCESSES: list[tuple[str, list[str]]] = [
    ("-m jax_impl.train --policy bf17", ["--policy", "bf17"]),
    ("-m torch_ref.train --policy bf17", ["--policy", "bf17"]),
    ("-m lockstep sample nowhere", ["nowhere", "not a run"]),
    ("-m benchmarks.run nonsense", ["NAME", "nonsense"]),
    ("-m pytest ROOT/parity_tests/input/test_cli.py --device gaudi", ["--device", "gaudi", "cuda"]),
    ("-m pytest ROOT/parity_tests/input/test_cli.py --fuzz 0", ["--fuzz", "0", "give N"]),
    ("-m pytest ROOT/parity_tests/input/test_cli.py --status no/x.json", ["--status", "no/x.json"]),
    ("-m pytest ROOT/parity_tests/input/test_cli.py --machine z80", ["--machine z80", "avx2-4"]),
]
