"""How good a global posterior is: before and after personalisation, client by client, as the mean over clients."""

from fedhb.evaluation.evaluate import evaluate, global_metrics, personalised_metrics
from fedhb.evaluation.observer import Observer

__all__ = ["Observer", "evaluate", "global_metrics", "personalised_metrics"]
