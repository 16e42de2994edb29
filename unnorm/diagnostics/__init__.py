"""Can the numbers be trusted? Effective sample size, Pareto k, R-hat, a verdict in words, and a report on the noise."""

from unnorm.diagnostics.noise_report import NoiseReport, certified_limit, noise_report
from unnorm.diagnostics.trust import (
    KHAT_LIMIT,
    LEAST_ESS,
    R_HAT_LIMIT,
    believable,
    chain_ess,
    doubt,
    effective_sample_size,
    pareto_khat,
    r_hat,
    smooth_tail,
    tail_length,
)
from unnorm.diagnostics.verdicts import LEAST_ROWS_TO_JUDGE, Part, Verdict, judge_fit, judge_log_z, judge_samples

__all__ = [
    "KHAT_LIMIT",
    "LEAST_ESS",
    "LEAST_ROWS_TO_JUDGE",
    "R_HAT_LIMIT",
    "NoiseReport",
    "Part",
    "Verdict",
    "believable",
    "certified_limit",
    "chain_ess",
    "doubt",
    "effective_sample_size",
    "judge_fit",
    "judge_log_z",
    "judge_samples",
    "noise_report",
    "pareto_khat",
    "r_hat",
    "smooth_tail",
    "tail_length",
]
