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
        ("cpu --device tpu", ["--device", "tpu", "cpu"]),
        ("speed --only snail", ["--only", "snail", "no job"]),
        ("smoke --out half", ["--out", "half", "is a folder"]),
        ("smoke --out notes.md", ["notes.md", "no file of results"]),
        ("smoke --out notes.md/x", ["--out", "notes.md", "is a file"]),
        (f"smoke --out {LONG}", ["--out", LONG, "name another"]),
        ("policies --scale huge", ["--scale", "huge", "smoke"]),
        ("policies --device tpu", ["--device", "tpu", "cpu"]),
        ("smoke --no", ["--no", "unknown"]),
    ],
    "benchmarks.report": [
        ("", ["FILE", "--help"]),
        ("nowhere", ["nowhere", "holds no rows", "benchmarks.run"]),
        ("spoilt.jsonl", ["spoilt.jsonl", "invalid JSON", "name another"]),
        ("strange.jsonl", ["strange.jsonl", "a row without a name"]),
        ("half stray", ["stray", "--help"]),
    ],
    "benchmarks.documents": [("power", ["power", "--help"])],
    "benchmarks.lesson": [("nothing", ["CELL", "nothing", "unknown"])],
    "parity_tests.bugs": [("no-clip", ["no-clip", "--help"])],
    "parity_tests.gate": [
        ("", ["COMMIT", "--help"]),
        ("nonsense", ["COMMIT", "nonsense", "git log"]),
        ("HEAD --curves", ["--curves", "unknown"]),
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
