"""What the plan's tests share."""

from typing import Any

from lockstep.config.policy import POLICIES
from lockstep.plan.setting import Setting


def setting(**changed: Any) -> Setting:
    framework = changed.pop("framework", "torch")
    given: dict[str, Any] = {"framework": framework, "backend": "ampere", "remat": "none",
                             "roles": POLICIES["bf16"], "rows": 8}  # fmt: skip
    return Setting(**{**given, **changed})
