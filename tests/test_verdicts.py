"""The three parts of a verdict, each at its levels."""

import math

import pytest
import torch

from unnorm.diagnostics import Part, Verdict, judge_fit, judge_log_z, judge_samples
from unnorm.errors import BrokenFile
from unnorm.trend import Looks, Trend
from unnorm.types import LogZ

GOOD = LogZ(1.0, 0.003, 40_000.0, 0.1, "importance", 200_000)
ON_GRID = LogZ(1.002, 1e-6, math.nan, math.nan, "grid", 1000)
BOTH = LogZ(1.0, 0.02, 600.0, math.nan, "bracket", 800)
BAD = GOOD._replace(khat=2.0)
STOPPED = Trend(1.0, 0.0, 0.01, 0.0, 0.01, True)


class TestLogZ:
    @pytest.mark.parametrize(
        ("log_z", "level", "reason"),
        [
            ({"importance": GOOD}, "TRUST", "known to 0.003 nats"),
            ({"importance": GOOD, "grid": ON_GRID}, "TRUST", "importance sampling agrees within 0.0020 ± 0.0030"),
            ({"importance": GOOD._replace(khat=0.9)}, "DISTRUST", "Pareto k is 0.90"),
            ({"importance": GOOD._replace(khat=math.inf)}, "DISTRUST", "Pareto k is inf"),
            ({"importance": GOOD._replace(khat=math.nan)}, "DISTRUST", "Pareto k is nan"),
            ({"importance": GOOD._replace(khat=0.9), "grid": ON_GRID}, "TRUST", "importance sampling cannot check it"),
            ({"importance": GOOD._replace(stderr=0.1)}, "CARE", "known to 0.1 nats"),
            ({"importance": GOOD._replace(stderr=2.0)}, "DISTRUST", "known only to 2 nats"),
            ({"importance": GOOD._replace(ess=20.0)}, "DISTRUST", "only 20 effective draws of 200000"),
            ({"importance": GOOD._replace(value=math.nan)}, "DISTRUST", "is nan"),
            ({"importance": GOOD._replace(value=1.03), "grid": ON_GRID}, "CARE", "differ by 0.028"),
            ({"importance": GOOD._replace(value=3.0), "grid": ON_GRID}, "DISTRUST", "differ by 1.998"),
            ({"importance": GOOD, "grid": ON_GRID._replace(stderr=0.2)}, "CARE", "known to 0.2 nats"),
            ({"importance": BAD, "ais": GOOD._replace(method="ais")}, "TRUST", "by annealed importance sampling"),
            ({"importance": BAD, "bracket": BOTH}, "TRUST", "from both ends (600 of 800 where they meet)"),
            ({"importance": BAD, "bracket": BOTH._replace(ess=50.0)}, "DISTRUST", "only 50 effective draws of 800"),
            ({"importance": GOOD, "grid": ON_GRID._replace(stderr=math.inf)}, "DISTRUST", "grid"),
        ],
    )
    def test_levels(self, log_z, level, reason):
        found = judge_log_z(log_z)
        assert (found.level, reason in found.text) == (level, True), found

    @pytest.mark.parametrize(
        ("changes", "level"),
        [
            ({"stderr": 0.05}, "TRUST"),
            ({"stderr": 0.0501}, "CARE"),
            ({"stderr": 0.5}, "CARE"),
            ({"stderr": 0.501}, "DISTRUST"),
            ({"khat": 0.699}, "TRUST"),
            ({"khat": 0.7}, "DISTRUST"),
            ({"ess": 100.0}, "TRUST"),
            ({"ess": 99.9}, "DISTRUST"),
            ({"stderr": math.inf}, "DISTRUST"),
        ],
        ids=str,
    )
    def test_borders(self, changes, level):
        assert judge_log_z({"importance": GOOD._replace(**changes)}).level == level

    @pytest.mark.parametrize(
        ("gap", "level"), [(0.0089, "TRUST"), (0.0091, "CARE"), (0.099, "CARE"), (0.101, "DISTRUST")]
    )
    def test_borders_of_a_disagreement(self, gap, level):
        """Three errors of 0.003 nats, and a tenth of a nat."""
        assert judge_log_z({"importance": GOOD._replace(value=ON_GRID.value + gap), "grid": ON_GRID}).level == level

    def test_a_quadrature_is_named(self):
        found = judge_log_z({"quadrature": ON_GRID._replace(method="quadrature")})
        assert (found.level, "by quadrature, one coordinate after the other" in found.text) == ("TRUST", True)

    def test_a_doubt_is_said_once(self):
        bad = {"importance": GOOD._replace(khat=0.9)}
        assert judge_log_z(bad, ["Pareto k is 0.90, not below 0.7"]) == judge_log_z(bad)

    def test_doubts_outweigh_missing_rows(self):
        assert judge_log_z({"importance": GOOD}, ["it diverged"], unchecked="no rows were given").level == "DISTRUST"

    def test_what_the_ladder_doubts_is_distrusted(self):
        found = judge_log_z({"importance": GOOD}, ["the noise misses mass"])
        assert found == Part("DISTRUST", "cannot be believed: the noise misses mass")

    def test_what_no_rows_have_checked_is_at_most_care(self):
        found = judge_log_z({"importance": GOOD}, unchecked="no rows were given")
        assert found.level == "CARE"
        assert "not checked (no rows were given): rows of the data would settle it" in found.text

    @pytest.mark.parametrize(("rows", "level"), [(1000, "TRUST"), (178, "TRUST"), (25, "CARE")])
    def test_rows_bound_what_may_be_missed(self, rows, level):
        """The rule of three: of n rows 1 - 0.05^(1/n) of the mass is not ruled out; 25 rows leave 0.06 nats."""
        found = judge_log_z({"importance": GOOD}, not_ruled_out=1 - 0.05 ** (1 / rows))
        assert found.level == level


class TestFit:
    @pytest.mark.parametrize(
        ("gain", "error", "rows", "trend", "level", "reason"),
        [
            (1.5, 0.1, 500, STOPPED, "TRUST", "+1.500 ± 0.100 nats a row over its noise, on 500 held-out rows"),
            (0.0, 0.0, 500, STOPPED, "TRUST", "the noise fits as well"),
            (-0.15, 0.1, 500, STOPPED, "TRUST", "-0.150"),
            (-0.2, 0.1, 500, STOPPED, "TRUST", "-0.200"),
            (-0.201, 0.1, 500, STOPPED, "DISTRUST", "worse than its noise"),
            (-0.25, 0.1, 500, STOPPED, "DISTRUST", "worse than its noise"),
            (-0.25, 0.1, 5, STOPPED, "DISTRUST", "worse than its noise"),
            (-1e-3, 0.0, 500, STOPPED, "TRUST", "-0.001"),
            (-1.1e-3, 0.0, 500, STOPPED, "DISTRUST", "worse than its noise"),
            (math.inf, 0.1, 500, STOPPED, "DISTRUST", "no finite log density"),
            (-1e-7, 0.0, 500, STOPPED, "TRUST", "the noise fits as well"),
            (math.nan, 0.1, 500, STOPPED, "DISTRUST", "no finite log density"),
            (1.5, 0.1, 29, STOPPED, "CARE", "29 held-out rows say little"),
            (1.5, 0.1, 30, STOPPED, "TRUST", "30 held-out rows"),
            (1.5, math.inf, 1, STOPPED, "CARE", "on 1 held-out row;"),
            (None, math.inf, 0, None, "CARE", "no rows were held out"),
            (1.5, 0.1, 500, None, "CARE", "not known"),
            (1.5, 0.1, 500, Trend(1.0, 0.2, 0.01, 0.0, 0.01, False), "CARE", "still improving"),
            (1.5, 0.1, 500, Trend(1.0, 0.2, 0.01, 0.0, 0.01, True), "TRUST", "stopped improving"),
            (1.5, 0.1, 500, Trend(1.0, 0.0, 0.01, 0.3, 0.1, True), "CARE", "overfitted after the step that was kept"),
            (1.5, 0.1, 500, Trend(1.0, 0.0, 0.01, 0.15, 0.1, True), "TRUST", "stopped improving"),
        ],
    )
    def test_levels(self, gain, error, rows, trend, level, reason):
        found = judge_fit(gain, error, rows, trend, steps=100)
        assert (found.level, reason in found.text) == (level, True), found

    def test_without_training_the_noise_is_the_density(self):
        assert "the noise alone is the density" in judge_fit(0.0, 0.0, 500, None, steps=0).text

    def test_why_training_was_given_up_ends_once(self):
        found = judge_fit(0.0, 0.0, 500, None, failed="At step 3 it diverged. Lower the rate.")
        assert found.text.endswith("the noise alone is the density: At step 3 it diverged. Lower the rate")

    @pytest.mark.parametrize("gain", [-1.0, math.nan])
    def test_warnings_stand_beside_a_bad_fit(self, gain):
        found = judge_fit(gain, 0.1, 500, STOPPED, warned=["At step 10, lag: u is too slow", "At step 20, score: high"])
        assert found.level == "DISTRUST"
        for cause in ("at step 10, lag", "at step 20, score"):
            assert f"the health monitor warned ({cause})" in found.text

    def test_what_else_counts(self):
        assert judge_fit(1.0, 0.1, 500, STOPPED, wholly_finite=False).level == "DISTRUST"
        assert judge_fit(1.0, 0.1, 500, STOPPED, failed="it diverged").level == "DISTRUST"
        warned = judge_fit(1.0, 0.1, 500, STOPPED, warned=["At step 10, lag: u is too slow"])
        assert (warned.level, "at step 10, lag" in warned.text) == ("CARE", True)
        assert judge_fit(1.0, 0.1, 500, STOPPED, problems=["a column is a copy"]).level == "CARE"


class TestSamples:
    @pytest.mark.parametrize(
        ("n", "worth", "r_hat", "level"),
        [
            (1000, 1000.0, math.nan, "TRUST"),
            (1000, 101.0, 1.01, "TRUST"),
            (1000, 99.0, 1.01, "DISTRUST"),
            (5000, 400.0, 1.01, "CARE"),
            (1000, 500.0, 1.2, "CARE"),
            (50, 50.0, math.nan, "TRUST"),
            (50, 49.0, math.nan, "DISTRUST"),
            (1000, 100.0, 1.01, "TRUST"),
            (5000, 500.0, 1.01, "TRUST"),
            (5000, 499.0, 1.01, "CARE"),
            (5000, 100.0, 1.01, "CARE"),
            (5000, 99.0, 1.01, "DISTRUST"),
            (1000, 500.0, 1.05, "TRUST"),
            (1000, 500.0, 1.051, "CARE"),
            (1000, 0.0, math.nan, "DISTRUST"),
        ],
    )
    def test_levels(self, n, worth, r_hat, level):
        assert judge_samples("chains", n, worth, r_hat).level == level

    def test_how_and_how_many(self):
        assert (
            judge_samples("from a grid", 1000, 1000.0).text
            == "from a grid; 1,000 draws are worth 1,000 independent ones"
        )
        assert judge_samples("chains", 5000, 400.0, 1.01).text.endswith("worth 400 independent ones, R-hat 1.01")


class TestWhole:
    def test_the_word_is_the_worst(self):
        parts = {level: Part(level, "so") for level in ("TRUST", "CARE", "DISTRUST")}
        assert Verdict(parts["TRUST"], parts["CARE"], parts["TRUST"]).level == "CARE"
        assert Verdict(parts["TRUST"], parts["CARE"], parts["DISTRUST"]).level == "DISTRUST"
        assert Verdict(parts["TRUST"]).level == "TRUST"
        assert Verdict(parts["DISTRUST"], parts["TRUST"], parts["CARE"]).level == "DISTRUST"
        assert Verdict(parts["TRUST"], None, parts["CARE"]).level == "CARE"

    def test_lines(self):
        verdict = Verdict(Part("TRUST", "a"), Part("CARE", "b"), Part("DISTRUST", "c"))
        assert verdict.text().splitlines() == [
            "DISTRUST",
            "  log Z    TRUST     a.",
            "  Fit      CARE      b.",
            "  Samples  DISTRUST  c.",
        ]

    def test_plain_values_and_back(self):
        verdict = Verdict(Part("TRUST", "a"), None, Part("CARE", "b"))
        assert Verdict.from_plain(verdict.plain()) == verdict
        for broken in ({}, {"log Z": ["MAYBE", "a"]}, [1], {"log Z": ["TRUST"]}):
            with pytest.raises(BrokenFile, match="not a verdict"):
                Verdict.from_plain(broken)


class TestTrend:
    def looks(self, values, learned):
        looks = Looks()
        rows = torch.linspace(-1, 1, 101)
        for step, (value, rate) in enumerate(zip(values, learned, strict=True)):
            looks.add(step, rate, value + 0.01 * rows)
        return looks

    def test_the_last_tenth_is_looked_at(self):
        """By the summed learning rate: from the look at 0.9 of it to the best one."""
        trend = self.looks([3.0, 2.0, 1.5, 1.4], [0.0, 5.0, 9.0, 10.0]).trend(3, False)
        assert trend.gained == pytest.approx(1.6)
        assert trend.improved == pytest.approx(0.1)
        assert trend.still_improving
        assert not self.looks([3.0, 2.0, 1.5, 1.4], [0.0, 5.0, 9.0, 10.0]).trend(3, True).still_improving
        assert not self.looks([3.0, 2.0, 1.5, 1.499], [0.0, 5.0, 9.0, 10.0]).trend(3, False).still_improving

    def test_what_rose_after_the_best(self):
        trend = self.looks([3.0, 2.0, 2.5], [0.0, 5.0, 10.0]).trend(1, False)
        assert trend.rose == pytest.approx(0.5)
        assert trend.overfitted
        assert trend.improved == 0.0

    def test_too_few_looks(self):
        assert self.looks([3.0], [0.0]).trend(0, False) is None
        assert self.looks([3.0, 2.0], [0.0, 1.0]).trend(7, False) is None

    def test_carried_by_a_checkpoint(self):
        looks = self.looks([3.0, 2.0, 1.5], [0.0, 5.0, 10.0])
        assert Looks.of(looks.tensors()).trend(2, False) == looks.trend(2, False)
        assert Looks.of({}).steps == []
