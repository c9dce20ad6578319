"""The text of `--autotune`: the ways that replace the framework's own operations."""

from lockstep.errors import require

FLAG, AUTO, NONE = "--autotune", "auto", "none"
# All compute the same, but for the order of sums.
WAYS = {
    "attention": ("reference", "blocks", "widened"),  # written out; causal blocks; in float32
    "matmul": ("onednn", "ynnpack", "widened"),  # PyTorch's library, JAX's; PyTorch in float32
    "memory": ("kept",),  # what a step frees
}


def parse(text: str) -> dict[str, str]:
    """Parse attention=blocks,matmul=onednn into a way by its name; auto and none are no way.

    Raises:
        UserError: a way is unknown, or two have one name.
    """
    items = [] if text in (AUTO, NONE) else text.split(",")
    ways: dict[str, str] = {}
    for item in items:
        name, _, way = item.partition("=")
        known = ", ".join(f"{each}={'|'.join(WAYS[each])}" for each in WAYS)
        require(way in WAYS.get(name, ()), FLAG, text, f"{item!r} is unknown; use {known}")
        require(name not in ways, FLAG, text, f"has two of {name}; use one")
        ways[name] = way
    return ways
