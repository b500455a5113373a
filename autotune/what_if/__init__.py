"""What a deployment would gain elsewhere: answers from a profile, without the device or torch."""

from .answers import Answer, WhatIf
from .ask import what_if

__all__ = ["Answer", "WhatIf", "what_if"]
