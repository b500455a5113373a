"""Profiles: what `spectune` found out about one deployment, as strict types and YAML files.

This package describes; it neither decodes, measures nor decides, and it loads no torch.
"""

from .batches import BatchEvidence, BatchRange
from .deployment import GREEDY, Device, Domain, DraftRef, Sampling, TargetRef, draft_name
from .errors import SpectuneError, UsageError
from .evidence import Alternative, Evidence, Speedup
from .exporting import ENGINES, Export, export
from .finding import find
from .io import atomic_write, check_writable, load, save, to_yaml
from .match import FIELDS, Facts, Mismatch, compare
from .measurements import (
    Acceptance,
    BatchRuns,
    HoldoutTree,
    LatencyPoint,
    MeasuredTree,
    Measurements,
    PricedDraft,
    RoundPoint,
    Score,
    load_measurements,
    load_measurements_of,
    measurements_path,
    save_measurements,
)
from .probe import ProbedValue
from .recheck import Recheck
from .schema import SCHEMA_VERSION, Profile
from .seal import is_sealed, sealed
from .serving import Calibration, GuardSettings, PathTable, Serving
from .strict import format_validation_error, validated
from .summaries import (
    CostModelSummary,
    CostTable,
    ErrorSummary,
    JobSummary,
    Noise,
    RunnerUp,
    SearchSummary,
)
from .tree import PLAIN, TreeConfig

__all__ = [
    "ENGINES",
    "FIELDS",
    "GREEDY",
    "PLAIN",
    "SCHEMA_VERSION",
    "Acceptance",
    "Alternative",
    "BatchEvidence",
    "BatchRange",
    "BatchRuns",
    "Calibration",
    "CostModelSummary",
    "CostTable",
    "Device",
    "Domain",
    "DraftRef",
    "ErrorSummary",
    "Evidence",
    "Export",
    "Facts",
    "GuardSettings",
    "HoldoutTree",
    "JobSummary",
    "LatencyPoint",
    "MeasuredTree",
    "Measurements",
    "Mismatch",
    "Noise",
    "PathTable",
    "PricedDraft",
    "ProbedValue",
    "Profile",
    "RoundPoint",
    "Recheck",
    "RunnerUp",
    "Sampling",
    "Score",
    "SearchSummary",
    "Serving",
    "SpectuneError",
    "Speedup",
    "TargetRef",
    "TreeConfig",
    "UsageError",
    "atomic_write",
    "check_writable",
    "compare",
    "draft_name",
    "export",
    "find",
    "format_validation_error",
    "is_sealed",
    "load",
    "load_measurements",
    "load_measurements_of",
    "measurements_path",
    "save",
    "save_measurements",
    "sealed",
    "to_yaml",
    "validated",
]
