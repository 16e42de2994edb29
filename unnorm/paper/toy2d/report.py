"""What the synthetic study leaves for a reader, from its JSON lines alone: `report.md`, `report.html`, figures."""

from pathlib import Path

from unnorm.paper.page import Block, Heading, Lines, written
from unnorm.paper.toy2d.completeness import diverged
from unnorm.paper.toy2d.figures import figures
from unnorm.paper.toy2d.protocol import chosen_settings, protocol, provenance
from unnorm.paper.toy2d.results import FLOOR_ERRORS, Results, read
from unnorm.paper.toy2d.spec import TABLES
from unnorm.paper.toy2d.summary import details, headlines
from unnorm.paper.toy2d.tables import all_methods, fallen, likelihood, paper_table, rank_tables, standings

__all__ = ["write"]

LEGEND = (
    "Mean ± standard deviation over seeds. Bold: the least mean of its column. ≈: a paired t-test over the seeds "
    f"cannot tell it from the best (p > 0.05). °: at the noise floor: within {FLOOR_ERRORS} standard errors of what "
    "samples of the truth give; there the metric cannot tell the method from the truth. A method with a "
    "diverged seed ranks last. With so few seeds the test is weak: a tie is no evidence that two methods are equal."
)
PAPER = (
    "Below our value stands the paper's. The paper names no kernel and no unit of its MMD. Ours is the unbiased MMD "
    "squared with a Gaussian kernel and the median bandwidth; it can be negative. So absolute values cannot be "
    "matched, orders can: 'Rank correlation' is Spearman's, of our order with the paper's; its mean over the sets "
    "stands at the end."
)
LIKELIHOOD = (
    "The truth of each set has a known density, so each model has a known KL(truth, model), in nats. Below the test "
    "NLL of the models stands that of the truth itself on the same rows; over finite rows a model can be below it."
)


def write(folder: Path) -> list[Path]:
    """Write the report of the study in `folder` beside its `results.jsonl`; return the files written.

    Raises:
        InvalidValue: there is no `results.jsonl`.
        BrokenFile: it is not the record of a study, or a line of it is broken.
    """
    return written(Path(folder), _blocks(read(folder)))


def _blocks(results: Results) -> list[Block]:
    return [
        Heading(1, f"The synthetic study, size {results.starts[-1].get('size', 'unknown')}"),
        Heading(2, "Summary"),
        Lines(headlines(results)),
        standings(results),
        Heading(3, "In detail"),
        Lines(details(results)),
        Heading(2, "The tables of the paper"),
        Lines([LEGEND]),
        Lines([PAPER]),
        *(paper_table(results, table) for table in TABLES.values()),
        Heading(2, "Likelihood, which the paper could not give"),
        Lines([LIKELIHOOD]),
        *(likelihood(results, metric, style) for style in ("sgd", "adam") for metric in ("test_nll", "kl")),
        Heading(2, "Beyond the paper: all methods"),
        Lines([f"Every method in every style, compared with all others. {LEGEND}"]),
        *(all_methods(results, data) for data in results.data),
        Heading(2, "Average ranks"),
        *rank_tables(results),
        Heading(2, "What diverged"),
        Lines([diverged(results)]),
        fallen(results),
        Heading(2, "Figures"),
        *figures(results),
        Heading(2, "Chosen settings and training time"),
        *chosen_settings(results),
        Heading(2, "How it was done"),
        protocol(results),
        *provenance(results),
    ]
