"""How good is it? Likelihoods, each with its error."""

from unnorm.metrics.likelihood import NLL, log_probs, nll

__all__ = ["NLL", "log_probs", "nll"]
