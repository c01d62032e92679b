"""How good a global posterior is for each client, before and after personalisation."""

from fedhb.evaluation.evaluate import Evaluation
from fedhb.evaluation.observer import Observer

__all__ = ["Evaluation", "Observer"]
