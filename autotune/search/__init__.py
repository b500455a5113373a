"""The measured search: Optuna studies, their storages, and several workers at one of them.

The only package that imports optuna.
"""

from .measured import MeasuredStudy

__all__ = ["MeasuredStudy"]
