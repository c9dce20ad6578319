"""Every tolerance has a reason, and none is a figure of one machine."""

from lockstep.judge import tolerances
from lockstep.judge.tolerances import Tolerance


def test_every_tolerance_has_a_reason() -> None:
    found = [
        tolerance
        for value in vars(tolerances).values()
        for tolerance in (value.values() if isinstance(value, dict) else [value])
        if isinstance(tolerance, Tolerance)
    ]
    assert len(found) > 8
    assert all(tolerance.reason and tolerance.bound > 0 for tolerance in found)
