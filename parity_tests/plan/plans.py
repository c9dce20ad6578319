"""Makes the settings of the plan's tests."""

from typing import Any

from lockstep.plan.setting import Setting


def setting(**changed: Any) -> Setting:
    given: dict[str, Any] = {"framework": "torch", "ampere": True, "policy": "bf16",
                             "remat": "none", "rows": 8}  # fmt: skip
    return Setting(**given | changed)
