"""How a model is run: everything that a prediction depends on beside its shape."""

from dataclasses import dataclass

from lockstep.config.policy import Roles


@dataclass(frozen=True, kw_only=True)
class Setting:
    """N micro-batches of B rows."""

    framework: str
    account: str  # the framework whose constants hold: see recommend.account
    roles: Roles
    remat: str
    rows: int
    accum: int = 1
    libraries: float = 0.0  # bytes that these keep, where only resident memory can be read

    @property
    def scanned(self) -> bool:
        """Whether XLA runs the layers as one loop; the recommended command asks for it where it
        recomputes."""
        return self.account == "jax" and self.remat != "none"
