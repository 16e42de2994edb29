"""Can the numbers be trusted? Effective sample size, Pareto k, R-hat, a verdict in words, and a report on the noise."""

from unnorm.diagnostics.noise_report import NoiseReport, certified_limit, noise_report
from unnorm.diagnostics.verdicts import (
    KHAT_LIMIT,
    LEAST_ESS,
    R_HAT_LIMIT,
    Verdict,
    believable,
    chain_ess,
    doubt,
    effective_sample_size,
    pareto_khat,
    r_hat,
    smooth_tail,
    tail_length,
    verdict,
)

__all__ = [
    "KHAT_LIMIT",
    "LEAST_ESS",
    "R_HAT_LIMIT",
    "NoiseReport",
    "Verdict",
    "believable",
    "certified_limit",
    "chain_ess",
    "doubt",
    "effective_sample_size",
    "noise_report",
    "pareto_khat",
    "r_hat",
    "smooth_tail",
    "tail_length",
    "verdict",
]
