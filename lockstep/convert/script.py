"""Writes a converter that stands alone: a map's rules, and the modules that apply them."""

import ast
import json
from pathlib import Path

from lockstep.convert import axes, plan
from lockstep.convert.map import Map, rule_json
from lockstep.convert.plan import TensorRule

MODULES = (axes, plan)
HEAD = '''#!/usr/bin/env python3
"""Converts {reference} to {port}, and back with --back.

    python {file} SOURCE OUT [--back] [NAME=N ...]

SOURCE is a safetensors file, or a folder of shards with their index; OUT is a new file.
NAME=N gives a size that shapes do not tell. Needs numpy, safetensors and, for bfloat16, ml_dtypes.
RULES were proved by `lockstep check`, and this file was written by `lockstep convert --script`.
"""

'''
LIBRARIES = """
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

with contextlib.suppress(ImportError):  # without it numpy knows no bfloat16
    import ml_dtypes  # noqa: F401"""
MAIN = '''

def main(words: list[str]) -> None:
    """Converts a file."""
    back = "--back" in words
    source, out, *given = [word for word in words if word != "--back"]
    sizes = {name: int(n) for name, _, n in (word.partition("=") for word in given)}
    files = [Path(source)]
    if files[0].is_dir():
        index = json.loads((files[0] / "model.safetensors.index.json").read_text())
        files = [files[0] / name for name in sorted({*index["weight_map"].values()})]
    opened = [safe_open(file, "numpy") for file in files]
    owners = {name: file for file in opened for name in file.keys()}
    shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in owners.items()}
    rules = [TensorRule(**rule) for rule in RULES]
    made = make_plan(rules, shapes, back=back, sizes=sizes, shared=SIZES, tied=TIED, unused=UNUSED,
                     unfilled=UNFILLED)
    target = {}
    for name, shape in made.shapes.items():
        for copy in made.copies[name] + made.same[name]:
            x = owners[copy.source].get_tensor(copy.source)
            values, place = copy.views(x, target.setdefault(name, np.zeros(shape, x.dtype)))
            if copy in made.copies[name]:
                place[...] = values
            elif values.tobytes() != place.tobytes():
                raise Unfit(f"{copy.source} -> {name}: two tensors stand for one, and they differ")
    for other, name in made.twins.items():
        if owners[other].get_tensor(other).tobytes() != owners[name].get_tensor(name).tobytes():
            raise Unfit(f"{other}, {name}: two tensors stand for one, and they differ")
    save_file(target, out, metadata={"format": "pt"})
    print(f"{out}: {len(target)} tensors; not used: {', '.join(made.unused) or 'none'}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (Unfit, OSError) as error:
        sys.exit(f"error: {error}")
'''


def script_text(map_: Map, file: str) -> str:
    """Writes a converter's source.

    Args:
        file: its name, for its own help.
    """
    programs = {
        side: map_.programs.get(side, {}).get("program") or f"the {side}"
        for side in ("reference", "port")
    }
    imports, bodies = {"import json", "import sys", "from pathlib import Path"}, []
    for module in MODULES:
        names, body = _without_imports(Path(str(module.__file__)).read_text(encoding="utf-8"))
        imports |= names
        bodies.append(body)
    plain = sorted(each for each in imports if each != "import numpy as np")
    rules = ",\n    ".join(map(_rule_literal, map_.rules))
    tables = [
        f"RULES = [\n    {rules},\n]",
        f"SIZES = {json.dumps([*map_.sizes])}  # that hold for the whole model",
        f"TIED = {json.dumps(map_.tied)}  # other names of tensors",
        f"UNUSED = {json.dumps(map_.unused)}  # tensors that need no partner",
        f"UNFILLED = {json.dumps(map_.unfilled)}  # tensors that had none in the proof",
    ]
    head = HEAD.format(file=file, **programs) + "\n".join(["import contextlib", *plain, LIBRARIES])
    return head + "\n\n" + "\n".join(tables) + "\n" + "".join(bodies) + MAIN


def _rule_literal(rule: TensorRule) -> str:
    text = json.dumps({k: v for k, v in rule_json(rule).items() if k != "some"})
    return text[:-1] + ', "some": True}' if rule.some else text


def _without_imports(source: str) -> tuple[set[str], str]:
    """Splits a module in its imports of the standard library and numpy, and the rest."""
    tree, lines = ast.parse(source), source.splitlines()
    imports = set()
    for node in tree.body:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Import | ast.ImportFrom) or is_text:
            assert node.end_lineno
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
            text = ast.unparse(node)
            if not is_text and "lockstep" not in text:
                imports.add(text)
    return imports, "\n\n\n" + "\n".join(lines).strip("\n") + "\n"
