"""What a round costs: timed, fitted, and used to predict the speedup of any tree."""

from .model import CostModel, Prediction

__all__ = ["CostModel", "Prediction"]
