"""The two source lines at which the programs part, for the roots of a check."""

from collections.abc import Callable

from lockstep.check.follow import Followed, follow
from lockstep.check.locate import Root
from lockstep.check.port import Port
from lockstep.check.tapes import Asked, TapeSide
from lockstep.check.trace import Trace
from lockstep.errors import UserError
from lockstep_recorder.recording import prefixed

Follower = Callable[[], Followed]
MOST = 5_000_000  # elements of the reference's tensors; more would take minutes


def follow_data(program: Asked, reference: Trace, port: Port) -> Followed:
    """Follows the data of the first recorded batch through both programs.

    Args:
        program: the reference's, which is started again.

    Raises:
        UserError: a tape cannot be made, or would be too long.
    """
    size = sum(x.size for x in reference.weights.values())
    if size > MOST:
        raise UserError(f"the reference has {size} parameters; more than {MOST} take too long")
    batch, spec = prefixed("batch", reference.group("batch/0")), reference.about["batch"]
    sides = (TapeSide(program, reference.weights, batch, spec),
             TapeSide(port.program, port.initial, batch, spec))  # fmt: skip
    return follow(*sides, reference.weights)


def name_lines(roots: list[Root], follower: Follower | None, rounded: bool) -> list[str]:
    """Adds the two lines to the roots of the forward pass; returns notes.

    The first place where values part is the first root's. Later ones are told apart only where
    there are as many pairs of lines as roots.

    Args:
        rounded: a program makes a constant in float32, where values part, too.
    """
    forward = [root for root in roots if root.direction == "forward" and root.rung == "2i"
               and root.largest.rule != "state"]  # fmt: skip
    if not forward or follower is None:
        return []
    if rounded:
        return ["no lines are named: values part at a constant made in float32, too"]
    try:
        found = follower()
    except Exception as error:  # whatever happens here, the verdict stands
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        return [f"no lines are named: {kind}{error}"]
    pairs = [[part.reference, part.port] for part in found.parts]
    pairs = [pair for at, pair in enumerate(pairs) if all(pair) and pair not in pairs[:at]]
    if len(pairs) != len(forward):
        forward, pairs = forward[:1], pairs[:1]
    for root, pair in zip(forward, pairs):
        root.lines = pair
    return []
