"""A run's whole configuration: its sections, the presets, the dtypes of a policy."""

from lockstep.config.config import Config
from lockstep.config.model import DEEPEST, ModelConfig
from lockstep.config.presets import BPE, PRESETS, from_flags, to_flags
from lockstep.config.sections import (
    MOST_STEPS,
    DataConfig,
    ExecutionConfig,
    OptimConfig,
    PrecisionConfig,
    RunConfig,
)

__all__ = [
    "BPE",
    "DEEPEST",
    "MOST_STEPS",
    "PRESETS",
    "Config",
    "DataConfig",
    "ExecutionConfig",
    "ModelConfig",
    "OptimConfig",
    "PrecisionConfig",
    "RunConfig",
    "from_flags",
    "to_flags",
]
