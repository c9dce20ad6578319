"""What an instrument says: equal, different, or that this configuration cannot tell."""

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    EQUAL = "equal"
    DIFFERENT = "different"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One statistic held against its bound."""

    rule: str
    where: str  # the tensor or the step that the figure belongs to
    figure: float
    bound: float
    verdict: Verdict
    detail: str = ""  # both sides' figures, or what the horizon is

    def __str__(self) -> str:
        return (
            f"{self.verdict}: {self.rule} at {self.where} is {self.figure:.3g}, "
            f"bound {self.bound:.3g}{'; ' + self.detail if self.detail else ''}"
        )
