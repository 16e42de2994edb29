"""The report of the synthetic study: its numbers against numpy and scipy by hand, its page in a real browser."""

import base64
import inspect
import itertools
import json
import math
import re
import shutil
import zlib
from dataclasses import asdict, replace

import matplotlib
import matplotlib.image
import numpy as np
import pytest
import torch
from PIL import Image
from scipy import stats

from unnorm.errors import BrokenFile, InvalidValue
from unnorm.estimators import ContrastiveDivergence
from unnorm.optim import adam as adam_style
from unnorm.paper.toy2d import peers, problem, report, stack, tables
from unnorm.paper.toy2d.cells import Cell, agreement, column, p_value, paper_rank
from unnorm.paper.toy2d.completeness import RUNAWAY_KL, left_out
from unnorm.paper.toy2d.flow import SplineDensity
from unnorm.paper.toy2d.protocol import chosen_settings, protocol, provenance
from unnorm.paper.toy2d.results import METRICS, Place, Setting, choose, read
from unnorm.paper.toy2d.spec import DATA, METHODS, SIZES, STYLES, TABLES
from unnorm.paper.toy2d.standing import standing
from unnorm.paper.toy2d.summary import headlines, summarise

RATES = (0.1, 0.01, 0.001)
TUNED = {"bandwidth": (0.1, 0.2), "n_components": (8, 16)}
PLAN = asdict(
    replace(
        SIZES["full"],
        rates=dict.fromkeys(STYLES, RATES),
        bandwidths=TUNED["bandwidth"],
        components=TUNED["n_components"],
    )
)
LOST = Place("sm", "adam", "circles")  # diverges: two seeds at the best of its rates, more at the others
EVIL = "<script>alert('|x|')</script> **H200**"


def run(place, seed, lr, rng, n_steps=None, setting=None, status="ok"):
    level = {"meco": 0.02, "mcmc": 0.021, "flow": 0.005}.get(
        place.method, 0.03 + 0.01 * list(METHODS).index(place.method)
    )
    kl = level * (1 + abs(math.log10(lr or 0.01) + 2)) * math.exp(0.2 * rng.standard_normal())
    numbers = {
        "validation_nll": 3 + kl + 0.001 * rng.standard_normal(),
        "test_nll": 3 + kl,
        "kl": kl,
        "mmd": None if lr not in (None, 0.01) else 0.1 * kl - 0.0005,
        "frechet": None if lr not in (None, 0.01) else kl / 2,
        "log_z": 1.0,
        "outside": 0.01,
    }
    if status != "ok":
        numbers = dict.fromkeys(numbers)
    names = ("-".join(map(str, (*place, seed, lr, n_steps, setting))), *place, seed, lr, n_steps, setting, status)
    head = dict(
        zip(("key", "method", "style", "data", "seed", "lr", "n_steps", "setting", "status"), names, strict=True)
    )
    return {"kind": "run", **head, "steps": 5800, "seconds": 0.12, "diverged_at": None, **numbers}


def density(rng, peak=0.2):
    x, y = np.meshgrid(*2 * [np.linspace(-4.5, 4.5, 96)], indexing="ij")
    (a, b), width = 2 * rng.standard_normal(2), 0.5 + rng.random()
    values = np.round(255 * np.exp(-((x - a) ** 2 + (y - b) ** 2) / (2 * width**2))).astype(np.uint8)
    return {
        "cells": 96,
        "extent": 4.5,
        "peak": peak,
        "density": base64.b64encode(zlib.compress(values.tobytes())).decode(),
    }


def picture(place, run=None):
    """A line of its own: all of the density at one level, which `peak` sets."""
    flat = base64.b64encode(zlib.compress(np.full((96, 96), 255, dtype=np.uint8).tobytes())).decode()
    facts = {"kind": "picture", **place._asdict(), "seed": 0, "cells": 96, "peak": 1.0, "density": flat}
    return facts | ({} if run is None else {"run": run})


def settings_of(method, style):
    if method.tuned != "lr":
        return [(None, None, {method.tuned: value}) for value in TUNED[method.tuned]]
    return list(itertools.product(RATES, method.n_steps or (None,), (None,)))


def study(seeds=5):
    """The records of a whole study, one cell of it diverged."""
    rng = np.random.default_rng(0)
    facts = {"size": "full", "seed": 0, "seeds": seeds, "command": "unnorm reproduce toy2d", "version": "0.1.0"}
    facts |= {
        "commit": None,
        "hardware": EVIL,
        "python": "3.12.1",
        "torch": "2.11.0",
        "started": "2026-11-16T10:00:00Z",
    }
    yield {"kind": "study", "study": "toy2d", **facts, "settings": PLAN}
    yield {
        "kind": "throughput",
        "replicas": 3960,
        "stacked_per_second": 22395.96804370198,
        "single_per_second": 192.94698357020434,
        "ratio": 116.07317009728294,
        "device": "cuda",
    }
    for part, seconds in (("truths", 18.71), ("networks", 1380.15), ("truths", 0.5), ("networks", 0.15)):
        yield {"kind": "clock", "part": part, "seconds": seconds}
    for data in DATA:
        yield {
            "kind": "floor",
            "data": data,
            "entropy": 3.0,
            "mmd": 1e-5,
            "mmd_sd": 2e-4,
            "frechet": 1e-3,
            "frechet_sd": 5e-4,
            "n": 20,
            "test_nll": 3.01,
            "test_nll_sd": 0.02,
        }
        yield {"kind": "picture", "method": "truth", "style": "own", "data": data, "seed": 0, **density(rng)}
    for name, method in METHODS.items():
        for style in method.styles:
            yield {
                "kind": "timing",
                "key": f"{name}-{style}",
                "method": name,
                "style": style,
                "n_steps": None,
                "replicas": 120,
                "steps": 5800,
                "step_seconds": 2.1e-05,
                "single_seconds": 0.0041,
            }
            for data in DATA:
                place = Place(name, style, data)
                for (lr, n_steps, other), seed in itertools.product(settings_of(method, style), range(seeds)):
                    lost = place == LOST and seed < (2 if lr == 0.01 else 3)
                    found = run(place, seed, lr, rng, n_steps, other, "diverged" if lost else "ok")
                    yield found
                    if seed == 0 and not lost:
                        yield picture(place, found["key"]) | density(rng, 0.1)


def save(folder, records):
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "results.jsonl").write_text(text)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("study"), study())


@pytest.fixture(scope="module")
def records():
    return list(study())


@pytest.fixture(scope="module")
def results(folder):
    return read(folder)


@pytest.fixture(scope="module")
def written(folder):
    return report.write(folder)


def small(**levels):
    """KL of each method on circles in SGD-style, one value for each seed; a method with None in it diverged there."""
    place = {name: Place(name, "sgd", "circles") for name in levels}
    yield {"kind": "study", "seeds": max(map(len, levels.values())), "settings": {}}
    for name, values in levels.items():
        for seed, value in enumerate(values):
            record = run(
                place[name], seed, 0.01, np.random.default_rng(0), status="diverged" if value is None else "ok"
            )
            yield record | {"kl": value, "test_nll": value, "validation_nll": value, "mmd": value, "frechet": value}


class TestReading:
    def test_of_repeated_lines_the_last_counts(self, tmp_path):
        records = list(small(meco=[1.0, 2.0, 3.0]))
        found = read(save(tmp_path, [*records, records[1] | {"kl": 9.0}]))
        assert found.cell("kl", ("meco", "sgd"), "circles").values == {0: 9.0, 1: 2.0, 2: 3.0}

    def test_one_run_counts_once_under_two_keys(self, tmp_path):
        records = list(small(meco=[1.0, 2.0, 3.0]))
        found = read(save(tmp_path, [*records, records[1] | {"key": "other", "kl": 9.0}]))
        assert found.cell("kl", ("meco", "sgd"), "circles").values == {0: 9.0, 1: 2.0, 2: 3.0}

    def test_line_cut_short_by_a_kill_is_passed_over(self, tmp_path):
        path = save(tmp_path, small(meco=[1.0, 2.0, 3.0])) / "results.jsonl"
        path.write_bytes(path.read_bytes()[:-30])
        assert len(read(tmp_path).runs) == 2

    def test_any_other_broken_line_has_a_number(self, tmp_path):
        path = save(tmp_path, small(meco=[1.0, 2.0, 3.0])) / "results.jsonl"
        path.write_text(path.read_text().replace('"seed": 1', '"seed": '))
        with pytest.raises(BrokenFile, match="Line 3 of .*results.jsonl' is not JSON"):
            read(tmp_path)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"method": "mecco"}, "Line 2 .* Unknown method 'mecco'. Did you mean 'meco'"),
            ({"data": "circle"}, "Unknown data 'circle'. Did you mean 'circles'"),
            ({"status": None}, "a run needs 'status'"),
            ({"kl": "small"}, "its 'kl' is not a number"),
            ({"seed": 0.5}, "its 'seed' is not a whole number"),
            ({"kind": None}, "it has no 'kind'"),
        ],
    )  # fmt: skip
    def test_a_line_that_is_not_of_the_study_is_named(self, tmp_path, change, words):
        records = list(small(meco=[1.0, 2.0]))
        records[1] |= change
        with pytest.raises(BrokenFile, match=words):
            read(save(tmp_path, records))

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            ({"kind": "clock", "part": "truths"}, "a clock needs 'seconds'"),
            ({"kind": "clock", "part": "truths", "seconds": "long"}, "its 'seconds' is not a number"),
            ({"kind": "clock", "part": "truths", "seconds": math.inf}, "a clock needs 'seconds'"),
            ({"kind": "throughput", "ratio": "much"}, "its 'ratio' is not a number"),
            ({"kind": "study", "seeds": 2, "settings": {"rates": [0.1]}}, "'rates' of these, are no mapping"),
            (picture(Place("meco", "sdg", "moons")), "Unknown style 'sdg'. Did you mean 'sgd'"),
            (picture(Place("meccano", "sgd", "moons")), "Unknown method 'meccano'"),
        ],
    )  # fmt: skip
    def test_other_lines_are_checked_too(self, tmp_path, line, words):
        with pytest.raises(BrokenFile, match=words):
            read(save(tmp_path, [*small(meco=[1.0, 2.0]), line]))

    def test_clocks_of_all_starts_are_added_up(self, results):
        assert results.clock == pytest.approx({"truths": 19.21, "networks": 1380.3})

    def test_nothing_to_read(self, tmp_path):
        with pytest.raises(InvalidValue, match="holds no study"):
            read(tmp_path)
        with pytest.raises(BrokenFile, match="no line of kind 'study'"):
            read(save(tmp_path, list(small(meco=[1.0]))[1:]))
        with pytest.raises(BrokenFile, match="no line of kind 'run'"):
            read(save(tmp_path, list(small(meco=[1.0]))[:1]))


class TestNumbers:
    def test_settings_are_chosen_by_validation(self, records, results):
        """Against a slow loop over the records."""
        groups = {}
        for one in records:
            if one["kind"] == "run":
                place = (one["method"], one["style"], one["data"])
                groups.setdefault(place, {}).setdefault(Setting.of(one), []).append(one["validation_nll"])
        for place, settings in groups.items():
            best, least = None, (math.inf, math.inf)
            for setting, values in settings.items():
                known = [value for value in values if value is not None]
                if (len(values) - len(known), np.mean(known)) < least:
                    best, least = setting, (len(values) - len(known), np.mean(known))
            assert Setting.of(results.chosen[place][0]) == best
        assert [run["status"] for run in results.chosen[LOST]] == ["diverged"] * 2 + ["ok"] * 3

    def test_test_set_has_no_say(self, tmp_path):
        def at(lr, validation, test):
            for seed in range(2):
                one = run(Place("meco", "sgd", "moons"), seed, lr, np.random.default_rng(0))
                yield one | {"validation_nll": validation, "test_nll": test}

        records = [{"kind": "study", "seeds": 2}, *at(0.1, 1.0, 5.0), *at(0.01, 2.0, 0.0)]
        assert read(save(tmp_path, records)).cell("test_nll", ("meco", "sgd"), "moons").mean == 5.0

    @pytest.mark.parametrize(
        ("rates", "chosen"),
        [
            ({0.1: [1.0, 1.0, None], 0.01: [5.0, 5.0, 5.0]}, 0.01),
            ({0.1: [1.0, None, None], 0.01: [5.0, 5.0, None]}, 0.01),
            ({0.1: [1.0, 1.0, None], 0.01: [5.0, 5.0, None]}, 0.1),
            ({0.1: [None, None, None], 0.01: [5.0, None, None]}, 0.01),
        ],
    )  # fmt: skip
    def test_diverged_seeds_come_before_the_mean(self, rates, chosen):
        place, rng = Place("meco", "sgd", "moons"), np.random.default_rng(0)
        runs = [
            run(place, seed, lr, rng, status="diverged" if value is None else "ok") | {"validation_nll": value}
            for lr, values in rates.items()
            for seed, value in enumerate(values)
        ]
        assert {one["lr"] for one in choose(runs)[place]} == {chosen}

    def test_pictures_are_of_the_chosen_setting(self, results):
        assert results.picture(LOST) is None
        for place, runs in results.chosen.items():
            if place != LOST:
                assert results.picture(place)["run"] == runs[0]["key"]
                assert len(results.pictures[place]) > 1

    def test_picture_without_a_run(self, tmp_path):
        """The last of them, unless another is of the chosen run; one of a run that is not chosen is not shown."""
        place = Place("meco", "sgd", "circles")
        records = list(small(meco=[1.0, 2.0]))
        old, new, other, chosen = (
            picture(place, key) | {"peak": float(k)} for k, key in enumerate((None, None, "other", records[1]["key"]))
        )
        for lines, shown in (([old, new, other], new), ([chosen, old, new, other], chosen), ([other], None)):
            assert read(save(tmp_path, [*records, *lines])).picture(place) == shown

    @pytest.mark.parametrize("metric", ["mmd", "frechet", "test_nll", "kl"])
    def test_cells_ties_and_ranks_by_hand(self, results, metric):
        for table, data in itertools.product(TABLES.values(), DATA):
            rows = [(name, table.style) for name in table.paper]
            values = {row: [one[metric] for one in results.chosen[Place(*row, data)]] for row in rows}
            whole = {row: np.array(v) for row, v in values.items() if None not in v}
            found = results.column(metric, rows, data)
            best = min(whole, key=lambda row, whole=whole: whole[row].mean())
            ties = {r for r in whole if r != best and stats.ttest_rel(whole[r], whole[best]).pvalue > 0.05}
            means = [whole[row].mean() if row in whole else np.inf for row in rows]
            assert (found.best, found.ties, found.tested) == (best, ties, True)
            assert list(found.ranks.values()) == list(stats.rankdata(means))
            for row, numbers in whole.items():
                cell = results.cell(metric, row, data)
                assert (cell.mean, cell.sd) == pytest.approx((numbers.mean(), numbers.std(ddof=1)), rel=1e-12)

    def test_diverged_cell_is_last_and_never_ties(self, results):
        rows = results.rows("adam", origins=["paper"])
        found = results.column("kl", rows, "circles")
        cell = results.cell("kl", ("sm", "adam"), "circles")
        assert (cell.failed, cell.n, len(cell.values)) == (2, 5, 3)
        assert found.ranks["sm", "adam"] == len(rows)
        assert ("sm", "adam") not in found.ties

    def test_diverged_ones_share_the_last_ranks(self):
        cells = {"a": Cell({0: 1.0}, 1), "b": Cell({0: 3.0, 1: 3.0}), "c": Cell({}, 2), "d": None}
        assert column(cells).ranks == {"a": 2.5, "b": 1.0, "c": 2.5}

    def test_equal_differences(self):
        a, shifted = Cell({0: 1.0, 1: 2.0, 2: 4.0}), Cell({0: 2.0, 1: 3.0, 2: 5.0})
        assert (p_value(a, a), p_value(a, shifted)) == (1.0, 0.0)

    def test_two_seeds_are_too_few_for_a_test(self, tmp_path):
        save(tmp_path, small(meco=[1.0, 2.0], nce=[1.1, 2.1]))
        found = read(tmp_path).column("kl", [("meco", "sgd"), ("nce", "sgd")], "circles")
        assert (found.best, found.ties, found.tested) == (("meco", "sgd"), frozenset(), False)
        report.write(tmp_path)
        text = (tmp_path / "report.md").read_text()
        assert "With fewer than 3 common seeds no test is possible" in text
        assert len(re.findall("fewer than 3|no test is possible|for a test", text)) == 2, "said once, not in every line"

    def test_three_seeds_of_which_one_method_has_two(self, tmp_path):
        records = list(small(meco=[1.0, 2.0, 3.0], nce=[1.1, 2.1, 3.1]))[:-1]
        report.write(save(tmp_path, records))
        text = (tmp_path / "report.md").read_text()
        assert text.count("no test is possible") == 1
        assert (
            "**Table 2: MMD x 10,000, SGD-style (n = 3 seeds; some columns have too few common seeds for a test" in text
        )

    def test_agreement_is_spearmans(self, results):
        table = TABLES["mmd-sgd"]
        cells = {name: results.cell("mmd", (name, "sgd"), "moons") for name in table.paper}
        paper = {name: cells["moons"][0] for name, cells in table.paper.items()}
        expected = stats.spearmanr([cell.mean for cell in cells.values()], list(paper.values())).statistic
        assert agreement(cells, paper) == pytest.approx(expected, rel=1e-12)

    def test_noise_floor(self, results):
        for seeds in (1, 2, 5, 30):
            level = 1e-5 + 3 * 2e-4 * math.sqrt(1 / seeds + 1 / 20)
            below, above = (dict.fromkeys(range(seeds), level + one) for one in (-1e-9, 1e-9))
            assert results.at_floor("mmd", Cell(below), "moons")
            assert not results.at_floor("mmd", Cell(above), "moons")
        for metric in ("kl", "test_nll"):  # of one row each for model and truth: samples have no part in it
            assert not results.at_floor(metric, Cell({0: 0.0}), "moons")
        assert not results.at_floor("mmd", Cell({0: 0.0}, 1), "moons")

    def test_samples_of_the_truth_are_at_the_noise_floor(self, results):
        """All but as few as a normal has above 3; a mean that is 2 deviations of one pair off is not at the floor."""
        rng, seeds, pairs, sd = np.random.default_rng(0), 5, 20, 2e-4
        floors, means = (sd * rng.standard_normal((n, 20_000)).mean(0) for n in (pairs, seeds))
        at = 0
        for floor, mean in zip(floors, means, strict=True):
            found = replace(results, floors={"moons": {"mmd": floor, "mmd_sd": sd, "n": pairs}})
            at += found.at_floor("mmd", Cell(dict.fromkeys(range(seeds), mean)), "moons")
        assert abs(20_000 - at - 20_000 * stats.norm.sf(3)) < 4 * math.sqrt(20_000 * stats.norm.sf(3))
        assert not results.at_floor("mmd", Cell(dict.fromkeys(range(seeds), 1e-5 + 2 * sd)), "moons")

    @pytest.mark.parametrize("lost", ["n", "mmd", "mmd_sd"])
    def test_floor_that_is_not_known(self, results, lost):
        floor = {name: value for name, value in results.floors["moons"].items() if name != lost}
        assert not replace(results, floors={"moons": floor}).at_floor("mmd", Cell({0: -1.0}), "moons")

    def test_rank_in_the_paper_among_some(self):
        table = TABLES["frechet-adam"]
        numbers = {name: [cells[data][0] for data in DATA] for name, cells in table.paper.items()}
        some = [name for name in numbers if name not in ("meco", "cd")]
        ranks = stats.rankdata([numbers[name] for name in some], axis=0)
        assert paper_rank(table, "sm", DATA, some) == pytest.approx(ranks[some.index("sm")].mean())


class TestWords:
    @pytest.mark.parametrize(
        ("meco", "nce", "where", "words"),
        [
            ([1.0, 1.1, 1.2], [2.0, 2.2, 2.1], "alone", "MECO is alone best on 1 (circles)."),
            ([1.0, 2.0, 1.5], [1.1, 1.0, 1.6], "tied", "MECO is tied for best on 1 (circles)."),
            ([1.0, 2.0, 1.5], [1.1, 2.3, 1.4], "tied", "MECO is tied for best on 1 (circles)."),
            ([2.0, 2.2, 2.1], [1.0, 1.1, 1.2], "losses", "MECO loses on 1 (circles, to NCE: 2.1 against 1.1)."),
            ([2.0, None, 2.1], [1.0, 1.1, 1.2], "failed", "MECO diverges on 1 (circles)."),
            ([2.0, 2.2], [1.0, 1.1], "losses", "MECO has a larger mean than the best (untested) on 1 (circles, to NCE"),
        ],
    )  # fmt: skip
    def test_how_meco_stands(self, tmp_path, meco, nce, where, words):
        save(tmp_path, small(meco=meco, nce=nce))
        found = standing(read(tmp_path), "kl", "sgd")
        assert [name for name in ("alone", "tied", "losses", "failed") if getattr(found, name)] == [where]
        report.write(tmp_path)
        assert f"SGD-style, by KL: of 1 data set, {words}" in (tmp_path / "report.md").read_text()

    @pytest.mark.parametrize(
        ("meco", "nce", "words"),
        [
            ([1.0, 1.1, 1.2], [2.0, 2.2, 2.1], "alone best on 1 of 1 data set, is tied for best on 0 and loses on 0."),
            ([1.0, 2.0, 1.5], [1.1, 2.3, 1.4], "alone best on 0 of 1 data set, is tied for best on 1 and loses on 0."),
            ([1.0, 2.0, 1.5], [1.1, 1.0, 1.6], "alone best on 0 of 1 data set, is tied for best on 1 and loses on 0."),
            ([2.0, 2.2, 2.1], [1.0, 1.1, 1.2], "data set, is tied for best on 0 and loses on 1 (best there: NCE)."),
            ([2.0, 2.2], [1.0, 1.1], "has the least mean (untested) on 0 of 1 data set and has a larger mean than"),
            ([2.0, None, 2.1], [1.0, 1.1, 1.2], "is tied for best on 0, loses on 0 and diverges on 1."),
        ],
    )  # fmt: skip
    def test_headline_of_the_exact_kl(self, tmp_path, meco, nce, words):
        (line,) = [one for one in headlines(read(save(tmp_path, small(meco=meco, nce=nce)))) if "exact KL" in one]
        assert line.startswith("SGD-style, judged by the exact KL from the truth: MECO ")
        assert words in line

    @pytest.mark.parametrize("style", ["sgd", "adam"])
    def test_mean_ranks_by_hand(self, results, style):
        rows = [(name, style) for name, method in METHODS.items() if method.origin == "paper"]
        lines = [one for one in headlines(results) if one.startswith(STYLES[style])]
        assert len(lines) == 2
        for metric, name in METRICS.items():
            found = []
            for data in DATA:
                values = [[one[metric] for one in results.chosen[Place(*row, data)]] for row in rows]
                means = [math.inf if None in own else np.mean(own) for own in values]
                found.append(stats.rankdata(means)[rows.index(("meco", style))])
            assert f"{np.mean(found):.2f} by {name}" in lines[metric in ("test_nll", "kl")]
        paper = TABLES[f"mmd-{style}"].paper
        ranks = [
            stats.rankdata([cells[data][0] for cells in paper.values()])[list(paper).index("meco")] for data in DATA
        ]
        assert f"by MMD (paper: {np.mean(ranks):.2f})" in lines[0]
        assert lines[0].count("among 7 methods") == 1

    @pytest.mark.parametrize("style", ["sgd", "adam"])
    def test_cells_at_the_noise_floor_are_counted(self, results, style):
        at, total = 0, 0
        for name, data, metric in itertools.product(TABLES["mmd-sgd"].paper, DATA, ("mmd", "frechet")):
            values = [one[metric] for one in results.chosen[Place(name, style, data)]]
            floor, sd = {"mmd": (1e-5, 2e-4), "frechet": (1e-3, 5e-4)}[metric]
            level = floor + 3 * sd * math.sqrt(1 / 5 + 1 / 20)
            total, at = total + 1, at + (None not in values and np.mean(values) <= level)
        line = next(one for one in headlines(results) if one.startswith(f"{STYLES[style]}, judged by samples"))
        assert (f"{at} of the {total} cells" in line) == (at > 0)
        assert ("most of them" in line) == (2 * at > total)

    def test_most_cells_at_the_floor(self, tmp_path):
        floor = {
            "kind": "floor",
            "data": "circles",
            "n": 3,
            "mmd": 1.0,
            "mmd_sd": 0.5,
            "frechet": 0.3,
            "frechet_sd": 0.5,
        }
        records = [*small(meco=[1.0, 2.0, 1.4], nce=[1.1, 2.1, 1.6], sm=[7.0, 8.0, 9.0]), floor]
        (line,) = [one for one in headlines(read(save(tmp_path, records))) if "samples" in one]
        words = (
            "lie at the noise floor: within 3 standard errors of what samples of the truth give; there the metric "
            "cannot tell the method from the truth."
        )
        assert f"3 of the 6 cells of these methods {words}" in line
        (line,) = [one for one in headlines(read(save(tmp_path, [*records, floor | {"mmd": 9.0}]))) if "samples" in one]
        assert "4 of the 6 cells of these methods, most of them, lie at the noise floor" in line

    def test_headlines_come_first(self, results):
        words = summarise(results)
        assert words[: len(headlines(results))] == headlines(results)
        assert words[0].startswith("MECO, the paper's method, is compared with 6 other methods of its tables on 6 data")
        assert "Every network is given the same training time of 0.08 s, " in words[0]
        assert "(it took 0.12 to 0.12 s, by method)" in words[0]
        assert "of 48 comparisons" in words[1]

    def test_counts_runs_and_what_diverged(self, written, folder, records):
        text = (folder / "report.md").read_text()
        runs = [one for one in records if one["kind"] == "run"]
        lost = sum(one["status"] != "ok" for one in runs)
        assert f"{len(runs):,} runs, {lost} diverged and 0 more ran away (a finite KL above 10 nats)." in text
        cells = sum(len(method.styles) for method in METHODS.values()) * len(DATA) * 5
        assert f"Of the {cells:,} at the chosen settings 2 diverged and 0 ran away." in text
        assert "Ran away at" not in text
        assert "No setting without a diverged seed: Score matching, Adam-style: circles (2 of 5)." in text

    def test_counts_runs_that_ran_away(self, tmp_path):
        """Two at a rate of MECO that is not chosen, where an infinite KL is none of them, and one of NCE's."""
        records = list(small(meco=[1.0, RUNAWAY_KL, 1.0, 1.0], nce=[1.0, 2.0, RUNAWAY_KL + 1e-6, 2.0]))
        worse = [one | {"key": one["key"] + "'", "lr": 0.1, "validation_nll": 50.0} for one in records[1:5]]
        changes = ({"kl": 1e9}, {"kl": 11.0}, {"kl": math.inf}, {"kl": None, "status": "diverged"})
        worse = [one | change for one, change in zip(worse, changes, strict=True)]
        (line,) = [one for one in summarise(read(save(tmp_path, [*records, *worse]))) if "ran away" in one]
        assert line == (
            "12 runs, 1 diverged and 3 more ran away (a finite KL above 10 nats). Of the 8 at the chosen settings 0 "
            "diverged and 1 ran away. Ran away at the chosen settings: NCE, SGD-style: circles (1 of 4)."
        )

    def test_what_diverged_by_learning_rate(self, tmp_path):
        """MECO: of four at 0.1 two diverge and one runs away; at 0.01 none; NCE has one rate only."""
        records = list(small(meco=[1.0, 1.0, 1.0, 1.0], nce=[1.0, 2.0, 2.0, 2.0]))
        fell = {"kl": None, "validation_nll": None, "status": "diverged"}
        changes = (fell, fell, {"kl": 11.0, "validation_nll": 50.0}, {"validation_nll": 50.0})
        worse = [
            one | {"key": one["key"] + "'", "lr": 0.1} | change
            for one, change in zip(records[1:5], changes, strict=True)
        ]
        results = read(save(tmp_path, [*records, *worse]))
        (line,) = [one for one in headlines(results) if "by learning rate" in one]
        assert line == (
            "SGD-style, MECO's runs by learning rate: at 0.1, 2 of 4 diverge, 1 of 4 run away; at 0.01, none (away: a "
            "finite KL above 10 nats)."
        )
        grid = tables.fallen(results)
        assert grid.head == ["Method", "0.1", "0.01"]
        assert {row[0].text: [(one.text, one.best) for one in row[1:]] for row in grid.rows} == {
            "NCE, SGD-style": [("-", False), ("0 of 4", False)],
            "MECO, SGD-style": [("2 + 1 of 4", True), ("0 of 4", False)],
        }

    @pytest.mark.parametrize(("size", "words"), [("smoke", "its numbers mean nothing"), ("laptop", "is a preview")])
    def test_small_sizes_open_with_a_caution(self, tmp_path, size, words):
        start, *rest = small(meco=[1.0, 2.0])
        assert words in headlines(read(save(tmp_path, [start | {"size": size}, *rest])))[0]
        assert not any(words in line for line in headlines(read(save(tmp_path, [start | {"size": "full"}, *rest]))))

    def test_the_truths_own_likelihood_stands_below(self, written, folder):
        text = (folder / "report.md").read_text()
        assert "| The truth, on the same rows | 3.010 ± 0.020 |" in text

    def test_nothing_diverged(self, tmp_path):
        (line,) = [one for one in summarise(read(save(tmp_path, small(meco=[1.0, 2.0])))) if "ran away" in one]
        assert line == "2 runs, 0 diverged and 0 more ran away (a finite KL above 10 nats)."

    def test_what_was_left_out(self, results, records, tmp_path):
        assert left_out(results)[0].startswith("Nothing was left out")
        fewer = [one for one in records if one.get("method") != "snl" and one.get("seed") != 4]
        found = " ".join(left_out(read(save(tmp_path, fewer))))
        assert "Not run: SNL, SGD-style; SNL, Adam-style." in found
        absent = sum(one["kind"] == "run" and one["method"] != "snl" and one["seed"] == 4 for one in records)
        assert f"{absent} of " in found
        unmeasured = [one | {"mmd": None} for one in small(meco=[1.0, 2.0])]
        found = " ".join(left_out(read(save(tmp_path, unmeasured))))
        assert "MMD was not measured at the chosen setting in 1 cell: MECO, SGD-style." in found


class TestHowItWasDone:
    def test_throughput_and_clock(self, written, folder):
        text = (folder / "report.md").read_text()
        words = "22,396 replica-steps a second side by side, 193 one by one: 116 times as many, by method 195 to 195."
        assert f"| throughput | 3,960 replicas on cuda: {words}" in text
        assert "Matrix products of both: TF32. |" in text
        lines = "| truths | 19.2 |", "| networks | 1,380.3 |", "| noted | 1,399.5 |"
        assert "\n".join(lines) in text
        assert "in total" not in text

    def test_clocks_of_every_piece_of_work(self, tmp_path):
        pieces = [{"kind": "clock", "part": part, "seconds": 0.25} for part in 40 * ["truths", "networks", "networks"]]
        save(tmp_path, [*small(meco=[1.0, 2.0]), *pieces])
        assert read(tmp_path).clock == {"truths": 10.0, "networks": 20.0}
        (grid,) = [one for one in provenance(read(tmp_path)) if one.caption.startswith("Wall seconds")]
        assert [[entry.text for entry in row] for row in (*grid.rows, *grid.foot)] == [
            ["truths", "10.0"],
            ["networks", "20.0"],
            ["noted", "30.0"],
        ]

    def test_last_throughput_counts(self, tmp_path):
        found = {"kind": "throughput", "key": "a", "replicas": 10, "device": "cuda", "ratio": 5.0}
        lines = [found, found | {"key": "b", "replicas": 1234}, found | {"replicas": 99}]
        for count, words in ((1, "10 replicas"), (2, "1,234 replicas"), (3, "99 replicas")):
            results = read(save(tmp_path, [*small(meco=[1.0, 2.0]), *lines[:count]]))
            (text,) = [row[1].text for row in provenance(results)[0].rows if row[0].text == "throughput"]
            assert text.startswith(f"{words} on cuda")
        assert read(save(tmp_path, small(meco=[1.0]))).throughput is None

    def test_every_start_is_listed(self, tmp_path):
        """Once, with what was its own; a line that was written twice is one start."""
        records = list(small(meco=[1.0, 2.0]))
        facts = {"started": "10:00", "command": "unnorm a", "commit": "abc", "hardware": "H200"}
        changes = {"started": "11:00", "commit": None}, {"started": "12:00", "command": "unnorm b", "hardware": "CPU"}
        starts = [records[0] | facts, *(records[0] | facts | change for change in changes)]
        results = read(save(tmp_path, [starts[0], *records[1:], starts[1], starts[1], starts[2]]))
        (grid,) = [one for one in provenance(results) if one.caption.startswith("Starts")]
        assert list(grid.head[:4]) == ["started", "command", "commit", "hardware"]
        assert [[entry.text for entry in row[:4]] for row in grid.rows] == [
            ["10:00", "unnorm a", "abc", "H200"],
            ["11:00", "unnorm a", "unknown", "H200"],
            ["12:00", "unnorm b", "abc", "CPU"],
        ]

    def test_edges_of_all_grids_are_marked(self, tmp_path):
        """Of three values of each kind the middle one is chosen on moons, an end on circles; two have no middle."""
        grids = {"meco": ("sgd", (0.1, 0.01, 0.001)), "kde": ("own", (0.1, 0.2, 0.4)), "gmm": ("own", (8, 16, 128))}
        records = [{"kind": "study", "seeds": 1}]
        for (name, (style, values)), data in itertools.product(grids.items(), ("circles", "moons", "swissroll")):
            for place, value in enumerate(values[:2] if data == "swissroll" else values):
                tuned = METHODS[name].tuned
                lr, other = (value, None) if tuned == "lr" else (None, {tuned: value})
                one = run(Place(name, style, data), 0, lr, np.random.default_rng(0), setting=other)
                best = {"circles": 2, "moons": 1, "swissroll": 0}[data]
                records.append(one | {"validation_nll": float(abs(place - best))})
        words, grid = chosen_settings(read(save(tmp_path, records)))[:2]
        assert grid.head[1:] == ["circles", "moons", "swissroll"]
        assert {row[0].text.split()[0]: [entry.text for entry in row[1:]] for row in grid.rows} == {
            "MECO,": ["0.001 ^", "0.01", "0.1"],
            "Kernel": ["bandwidth 0.4 ^", "bandwidth 0.2", "bandwidth 0.1"],
            "Gaussian": ["n_components 128 ^", "n_components 16", "n_components 8"],
        }
        assert words.lines[1].endswith("the least or the largest of three or more that were tried: 3 of 6.")

    def test_settings_are_for_a_person(self, written, folder):
        text = (folder / "report.md").read_text().split("**Settings of this size**")[1]
        rates = "SGD-style, Adam-style, its own way: 0.1, 0.01, 0.001"
        assert f"| learning rates to choose from | {rates} |" in text
        assert "| rows for training | 20,000 |" in text
        assert "| precision of matrix products in training | high (TF32) |" in text
        assert len(re.findall(r"^\| [a-z]", text, flags=re.MULTILINE | re.IGNORECASE)) == 1 + len(PLAN)
        assert not re.search(r"[{}'\[]", text)

    def test_protocol_is_what_the_study_does(self, results):
        text = " ".join(protocol(results).lines)
        for own in ("3 hidden layers of 300", "360 cells on a side", "500 rows", "10,000 points", "training: TF32."):
            assert own in text
        size = SIZES["smoke"]
        for one in stack.stacks(size, DATA, stack.STACKED, apart=False):
            training = one.training(size, 5)
            assert (training.schedule, training.iterate) == ("cosine", "last")
        adam = ("adam", "ngd-adam")
        assert dict(stack.OPTIMIZERS) == {"sgd": ("sgd", "ngd"), "adam": adam, "own": adam}
        assert dict(stack.USUAL_BETA) == pytest.approx({"sgd": 1.0, "adam": 1 - 0.9, "own": 1 - 0.9})
        assert (stack.PAPER_GAMMA, stack.PAPER_BETA) == (0.1, 0.9)
        assert "gamma 0.1 and beta 0.9" in text
        betas = adam_style([torch.nn.Parameter(torch.zeros(1))], 0.1, stack.PAPER_BETA).param_groups[0]["betas"]
        assert "Adam with betas ({:g}, {:g})".format(*betas) in text
        assert f"a KL above {RUNAWAY_KL:g} nats" in text
        assert f"half side {problem.WIDER} extents" in text
        assert peers.COARSER == 2
        langevin = inspect.signature(ContrastiveDivergence).parameters
        assert langevin["step_size"].default is None
        assert f"contrastive divergence takes {langevin['n_steps'].default} of them" in text
        assert f"MECO with bridges has {METHODS['meco-bridged'].options['bridges']} of them" in text

    def test_flow_of_the_protocol(self, results):
        pytest.importorskip("zuko")
        flow = SplineDensity(problem.Problem("moons", 0, SIZES["smoke"])).flow
        widths = [layer.out_features for layer in flow.transform.transforms[0].hyper if hasattr(layer, "out_features")]
        words = f"{len(flow.transform.transforms)} transforms and networks of {' x '.join(map(str, widths[:-1]))}"
        assert words in " ".join(protocol(results).lines)

    def test_without_settings(self, tmp_path):
        text = " ".join(protocol(read(save(tmp_path, small(meco=[1.0, 2.0])))).lines)
        assert "log p~ is a network with SiLU" in text
        assert "Matrix products" not in text


class TestFiles:
    def test_names(self, written, folder):
        densities = {f"densities-{style}{whose}.png" for style in ("sgd", "adam") for whose in ("", "-others")}
        names = {"report.md", "report.html", *densities, "kl.png", "sensitivity.png"}
        assert {path.relative_to(folder).name for path in written} == names
        assert all(path.stat().st_size for path in written)

    def test_markdown_holds_every_cell(self, written, folder, results):
        text = (folder / "report.md").read_text()
        for table, data in itertools.product(TABLES.values(), DATA):
            scale, caption = 1e4 if table.metric == "mmd" else 1, table.title.replace("MMD", "MMD x 10,000")
            section = text.split(f"**{caption} (n = 5 seeds)**")[1].split("\n**")[0]
            for name in table.paper:
                line = next(one for one in section.splitlines() if one.startswith(f"| {METHODS[name].title} |"))
                shown = line.split(" | ")[1 + DATA.index(data)].replace("*", "")
                mean, sd = re.match(r"(\S+) ± ([\d.]+)", shown).groups()
                cell = results.cell(table.metric, (name, table.style), data)
                near = pytest.approx((scale * cell.mean, scale * cell.sd), rel=0, abs=0.051 * scale * cell.sd)
                assert (float(mean), float(sd)) == near
                assert "paper {:.3f} ± {:.3f}".format(*table.paper[name][data]) in shown

    def test_marks(self, written, folder):
        text = (folder / "report.md").read_text()
        assert " ≈" in text
        assert "°" in next(
            line for line in text.splitlines() if line.startswith("| Neural spline flow (zuko) | **-0.0")
        )
        assert "(2 of 5 diverged)" in text

    def test_text_of_the_file_is_only_text(self, written, folder):
        page, text = (folder / "report.html").read_text(), (folder / "report.md").read_text()
        assert page.count("<script>") == 1
        assert "&lt;script&gt;alert(&#x27;|x|&#x27;)" in page
        assert r"&lt;script&gt;alert('\|x\|')&lt;/script&gt; \*\*H200\*\*" in text

    def test_a_study_of_one_run(self, tmp_path):
        records = [{"kind": "study", "seeds": 1}, run(Place("flow", "own", "moons"), 0, 0.01, np.random.default_rng(0))]
        report.write(save(tmp_path, records))
        assert "| Neural spline flow (zuko) |" in (tmp_path / "report.md").read_text()

    def test_broken_picture(self, tmp_path):
        broken = picture(Place("meco", "sgd", "circles")) | {"cells": 95}
        records = [*small(meco=[1.0, 2.0]), broken]
        with pytest.raises(BrokenFile, match="The picture of 'meco' on 'circles' is broken"):
            report.write(save(tmp_path, records))

    def test_densities_lie_the_right_way(self, tmp_path):
        """A density at large x and small y is drawn at the right and at the bottom: axis 0 of the file is x."""
        values = np.zeros((96, 96), dtype=np.uint8)
        values[86:, :10] = 255
        packed = base64.b64encode(zlib.compress(values.tobytes())).decode()
        line = picture(Place("meco", "sgd", "circles")) | {"peak": 2.0, "density": packed}
        report.write(save(tmp_path, [*small(meco=[1.0, 2.0]), line]))
        image = matplotlib.image.imread(tmp_path / "densities-sgd.png")
        yellow = np.abs(image[..., :3] - matplotlib.colormaps["viridis"](1.0)[:3]).sum(-1) < 0.02
        y, x = (places / size for places, size in zip(np.nonzero(yellow), image.shape, strict=False))
        assert min(len(x), len(y)) > 50
        assert min(x.min(), y.min()) > 0.9

    def test_figures_are_small_and_their_colours_true(self, written, tmp_path):
        for path in written:
            if path.suffix == ".png":
                with Image.open(path) as image:
                    assert image.mode == "P"
        place, levels = Place("meco", "sgd", "circles"), np.linspace(0, 255, 96).round().astype(np.uint8)
        ramp = base64.b64encode(zlib.compress(np.repeat(levels, 96).tobytes())).decode()
        report.write(save(tmp_path, [*small(meco=[1.0, 2.0]), picture(place) | {"density": ramp}]))
        image = 255 * matplotlib.image.imread(tmp_path / "densities-sgd.png")
        opaque = np.flatnonzero((image[..., 3] == 255).sum(0) > 180)
        assert len(opaque) == 2 * 96
        drawn = image[-20, opaque]
        exact = matplotlib.colormaps["viridis"](np.repeat(levels, 2), bytes=True)
        assert np.abs(drawn - exact).max() <= 6


@pytest.fixture(scope="module")
def browser():
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("chromium is not installed")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def page(browser, written, folder):
    found = browser.new_page(viewport={"width": 390, "height": 800}, color_scheme="light")
    found.seen = []
    found.on("console", lambda message: found.seen.append(message.text))
    found.on("pageerror", lambda error: found.seen.append(str(error)))
    found.on("request", lambda request: found.seen.append(request.url))
    found.goto((folder / "report.html").as_uri())
    yield found
    found.close()


def cells(page, caption, column):
    """The texts of a column of the table under a caption, in the order shown, without the paper's."""
    return page.evaluate(
        """([caption, column]) => {
            const figure = [...document.querySelectorAll("figure")].find((one) => one.innerText.startsWith(caption));
            return [...figure.querySelectorAll("tbody tr")].map((row) => row.cells[column].innerText.split("\\n")[0]);
        }""",
        [caption, column],
    )


class TestPage:
    caption = "Appendix: MMD x 10,000, Adam-style"

    def head(self, page, column):
        return page.locator("figure", has_text=self.caption).locator("thead th").nth(column)

    def test_loads_alone_and_silently(self, page, folder):
        page.evaluate("document.querySelectorAll('img').forEach((one) => one.scrollIntoView())")
        assert [one for one in page.seen if not one.startswith("data:")] == [(folder / "report.html").as_uri()]
        assert re.findall(r'(?:src|href)="(?!data:|#)', (folder / "report.html").read_text()) == []

    def test_sorts_numbers_as_numbers_with_diverged_last(self, page):
        column = 1 + DATA.index("circles")
        before = cells(page, self.caption, column)
        known = [text for text in before if "diverged" not in text]
        assert len(known) == len(before) - 1
        order = sorted(known, key=lambda text: float(text.split()[0]))
        lost = next(text for text in before if "diverged" in text)
        assert before != [*order, lost]
        head = self.head(page, column)
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == "ascending"
        assert cells(page, self.caption, column) == [*order, lost]
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == "descending"
        assert cells(page, self.caption, column) == [*order[::-1], lost]

    def test_paper_stands_beside_ours(self, page):
        figure = page.locator("figure", has_text=self.caption)
        row = figure.locator("tbody tr", has=page.get_by_role("rowheader", name="MECO", exact=True))
        paper = TABLES["mmd-adam"].paper["meco"]
        assert row.locator("small").all_inner_texts()[:-1] == [
            f"paper {mean:.3f} ± {sd:.3f}" for mean, sd in paper.values()
        ]

    def test_sorts_by_keyboard(self, page):
        head = self.head(page, 0)
        head.locator("button").focus()
        page.keyboard.press("Enter")
        names = cells(page, self.caption, 0)
        assert names == sorted(names, key=str.lower)
        assert head.get_attribute("aria-sort") == "ascending"
        assert page.locator("figure", has_text=self.caption).locator("[aria-sort]").count() == 1

    def test_long_numbers_are_not_sorted_as_words(self, page):
        """Ranks go above 9: as words, 10 would come before 2."""
        caption = "Among all methods and styles"
        page.locator("figure", has_text=caption).locator("thead th button").nth(4).click()
        found = [float(text.split()[0]) for text in cells(page, caption, 4)]
        assert max(found) > 10
        assert found == sorted(found)

    def test_figures_show_and_have_words(self, page):
        found = page.evaluate("[...document.images].map((one) => [one.naturalWidth, one.alt.length])")
        assert len(found) == 6
        assert all(width > 500 and words > 50 for width, words in found)

    @pytest.mark.parametrize("width", [390, 1200])
    def test_page_itself_does_not_scroll_sideways(self, page, width):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        wide = "[...document.querySelectorAll('.scroll')].some((one) => one.scrollWidth > one.clientWidth)"
        assert page.evaluate(wide) or width > 390

    def test_dark_colours_differ_and_print_is_light(self, page):
        def colours(**media):
            page.emulate_media(**media)
            return page.evaluate(
                "(({color, backgroundColor}) => [color, backgroundColor])(getComputedStyle(document.body))"
            )

        light, dark = (colours(media="screen", color_scheme=one) for one in ("light", "dark"))
        assert light[0] != dark[0]
        assert light[1] != dark[1]
        assert colours(media="print", color_scheme="dark") == light
        assert page.evaluate("getComputedStyle(document.querySelector('.scroll')).overflowX") == "visible"
        page.emulate_media(media="screen", color_scheme="light")

    def test_contents_lead_to_every_section(self, page):
        links = page.evaluate("[...document.querySelectorAll('nav a')].map((one) => one.hash.slice(1))")
        assert links == page.evaluate("[...document.querySelectorAll('h2')].map((one) => one.id)")
        assert page.evaluate("document.documentElement.lang") == "en"
