"""log Z by the cheapest way that can be believed."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from unnorm.diagnostics import KHAT_LIMIT, believable, doubt
from unnorm.errors import InvalidValue
from unnorm.models.stepwise import Stepwise
from unnorm.models.tilted import log_weight
from unnorm.noise.base import Noise, event_of, own_generator
from unnorm.partition.annealed import Annealing, ais, estimate, stuck
from unnorm.partition.bridge import Bracket, bracket, unseen
from unnorm.partition.climb import EXACT, Climb, Rung, nats
from unnorm.partition.grid import CELLS, LEAST_OUTSIDE, bounding_box, fitting_boxes, mass_outside, resolutions, summary
from unnorm.partition.importance import draw_into
from unnorm.partition.path import Schedule, plan
from unnorm.partition.probes import beyond_support, far_out
from unnorm.partition.routes import usual_path
from unnorm.partition.weights import RAREST, Weights
from unnorm.randomness import stream
from unnorm.samplers.base import frozen
from unnorm.types import LogDensity, LogZ, log_density

__all__ = ["Climb", "Rung", "ladder"]

FIRST_CHAINS, FEWEST_CHAINS = 512, 128
LEAST_DATA = 25  # rows: fewer say nothing about what was missed
NO_ROWS = "no rows from the data were given"
IMAGE = 3  # axes of an event
MOST_DATA = 4000  # rows of a kind that stand for samples of the model
BOX_POINTS = 8192
SETTLE = 100  # transitions that turn data into samples of the model
PLANE = 2  # dimensions up to which a grid costs less than many draws
PLANE_DRAWS = 2000
GRID_SHARE = 0.25  # of the wanted error: two resolutions may agree by chance
DENSER = 0.5  # nats by which data may exceed the densest cell
MOST_STUCK, MOST_STUCK_ALONE = 0.02, 0.005  # with data, which show what was missed, and without
LEAST_MISSED = 3
TOLERATED = 0.5  # mass that is missed, as a share of the error
HEAVY = 0.3  # Pareto k from which the error is taken as larger, up to twice at 0.7
FAIR = 3  # how much more than their share of the draws the rarest may carry of the weight
SIDES_APART = 4.0  # errors between one side of a bracket and both together
MISSES = "mass was missed"
QUADRATURE_ROWS = 200  # that tell its error
COARSE = 2.0  # nats of log p beyond which a quadrature is none


class _Problem(NamedTuple):
    """What every rung is told."""

    model: LogDensity
    noise: Noise
    data: Tensor | None  # all rows, held-out ones and those of the training by turns
    own: Tensor | None  # their log-weights
    reach: Tensor | None
    wanted: float
    generator: torch.Generator | None
    progress: bool | None
    tails: str | None  # what the model's tails have against any estimate
    support: str | None  # what the noise's support has against its own draws


def ladder(
    model: LogDensity,
    noise: Noise,
    *,
    data: Tensor | None = None,
    train: Tensor | None = None,
    reach: Tensor | None = None,
    stderr: float = 0.02,
    n: int = 200_000,
    first: int = 10_000,
    evaluations: int = 4_000_000,
    generator: torch.Generator | None = None,
    progress: bool | None = False,
) -> Climb:
    """Importance sampling, annealed importance sampling, a bracket: the first that reaches `stderr` with Pareto k below
    0.7, a hundred effective draws and no sign of missed mass ends the climb.

    In one and two dimensions a grid confirms or corrects the first rung; in three it comes between the first and the
    second. A `Stepwise` model is normalised: only the error of its quadrature is to be found, on data or own samples.

    Draws and chains cannot show mass that all of them miss. Only rows from the data can, and only as far as their
    number goes: `Climb.interval` includes the mass that the rows cannot rule out, and without rows nothing but a grid
    or a quadrature is trusted.

    Training rows count as much as held-out ones here. A model may have mass in narrow places around the rows that it
    was trained on, which no held-out row shows; and it has none where the data have and no training row lies. Both
    kinds are compared with the draws, and chains back from the data start at both by turns.

    Args:
        model: log p~.
        noise: q.
        data: held-out data, or samples of the model, in the model's units.
        train: rows that the model was trained on, in the model's units. No row may be given twice: each one counts.
            Fewer than 25 rows of both kinds together have no say, and more than 4,000 of a kind are not looked at.
        reach: further points that a grid must cover.
        stderr: the standard error that is enough.
        n: draws of the noise at most.
        first: draws of the noise before the first look.
        evaluations: of the model and its score at most, by annealed chains.
        generator: draws everything random.
        progress: a bar for annealed chains; None shows it on a terminal.

    >>> from unnorm import Gaussian, Quadratic
    >>> climb = ladder(Quadratic(2), Gaussian(2), generator=torch.Generator().manual_seed(0))
    >>> climb.trusted, climb.log_z.method, climb.log_z.n
    (True, 'grid', 7145)
    """
    if not stderr > 0 or min(n, first) < 100 or not (isinstance(n, int) and isinstance(first, int)):
        raise InvalidValue(f"The ladder needs stderr > 0 and 100 draws. Got stderr {stderr}, n {n}, first {first}.")
    rows, given = _rows(data, train, noise)
    if isinstance(model, Stepwise):
        rung = _by_quadrature(model, rows, stderr, generator)
        return Climb((rung,), stderr, () if rung.sound else (rung.why,))
    with frozen(model) as target:
        own = None
        if rows is not None:
            with torch.no_grad():
                own = log_weight(target, noise, rows)
        finite, tails = far_out(target, noise, alone=rows is None)
        support = beyond_support(target, noise)
        problem = _Problem(target, noise, rows, own, reach, stderr, generator, progress, tails, support)
        climb = _climb(problem, finite, n, first, evaluations)
    if rows is not None or climb.log_z.method in EXACT:
        return climb
    few = f"only {given} rows from the data were given, fewer than {LEAST_DATA}" if given else NO_ROWS
    return climb._replace(unchecked=f"{few}, and only these can show mass that the noise misses")


def _rows(data: Tensor | None, train: Tensor | None, noise: Noise) -> tuple[Tensor | None, int]:
    """The rows that are compared, held-out ones and those of the training by turns, and how many were given."""
    like, event = noise.sample(1, generator=own_generator(noise)), event_of(noise)
    kinds = []
    for name, rows in (("data", data), ("training rows", train)):
        if rows is None:
            continue
        rows = torch.as_tensor(rows)
        _check_rows(name, rows, event)
        # In an order of their own: sorted rows would show the rungs below one end of the data only.
        order = torch.randperm(len(rows), generator=stream(0, "order of the rows", name))[:MOST_DATA]
        kinds.append(rows[order.to(rows.device)].to(like))
    given = sum(map(len, kinds))
    if given < LEAST_DATA:
        return None, given
    both = min(map(len, kinds)) if len(kinds) > 1 else 0
    turns = torch.stack([rows[:both] for rows in kinds], 1).flatten(0, 1)
    return torch.cat([turns, *(rows[both:] for rows in kinds)]), given


def _climb(problem: _Problem, finite: bool, n: int, first: int, evaluations: int) -> Climb:
    """Rung by rung."""
    size = event_of(problem.noise)[0] if len(event_of(problem.noise)) == 1 else math.inf
    first = min(first, n) if size > PLANE else min(first, n, PLANE_DRAWS)
    rung, weights = _by_importance(problem, n if size > PLANE else first, first)
    rungs = [rung]
    if not finite:
        return Climb((rung,), problem.wanted, (problem.tails or "",))
    if size <= PLANE or (size in CELLS and not rungs[-1].enough):
        rungs.append(_by_grid(problem, rungs[-1].log_z))
    if not rungs[-1].enough:
        return _by_chains(problem, rungs, weights, evaluations)
    return Climb(tuple(rungs), problem.wanted, ())


def _by_quadrature(model: Stepwise, data: Tensor | None, wanted: float, generator: torch.Generator | None) -> Rung:
    """log Z = 0, and how much log p changes on average when the quadrature is twice as fine."""
    rows = model.sample(LEAST_DATA, generator=generator) if data is None else data[:QUADRATURE_ROWS]
    error = float(model.error(rows).double().abs().mean())
    found = LogZ(0.0, error, math.nan, math.nan, "quadrature", len(rows) * math.prod(rows.shape[1:]))
    coarse = f"the quadrature of single steps is off by {error:.2g} nats: use more 'nodes'"
    return _judged(found, wanted, coarse if error > COARSE else None)


def _check_rows(name: str, rows: Tensor, event: tuple[int, ...]) -> None:
    if len(rows) == 0 or tuple(rows.shape[1:]) != event:
        raise InvalidValue(f"The ladder's {name} must have shape (n, *{event}), n >= 1. Got {tuple(rows.shape)}.")
    if not bool(torch.isfinite(rows).all()):
        raise InvalidValue(f"The ladder's {name} contain NaN or infinity.")


def _judged(found: LogZ, wanted: float, against: str | None = None) -> Rung:
    """Enough, or the reasons why not."""
    problems = [problem for problem in (doubt(found), against) if problem is not None]
    if problems:
        return Rung(found, False, False, "; ".join(problems))
    if found.stderr > wanted:
        return Rung(found, True, False, f"stderr {found.stderr:.2g} is above the wanted {wanted:g}")
    return Rung(found, True, True, f"stderr {found.stderr:.2g} is within {wanted:g}")


def _missed(share: float, rows: int, stderr: float, where: str) -> str | None:
    """Whether the share of rows that lie `where` nobody looked is more than a few, and matters beside the error."""
    if share * rows < LEAST_MISSED or share < TOLERATED * stderr:
        return None
    return f"{share:.1%} of the data lie where {where}: {MISSES}"


def _by_importance(problem: _Problem, n: int, first: int) -> tuple[Rung, Weights]:
    """Draw, look how many draws the wanted error takes, and draw them if that is possible."""
    weights = Weights(n)
    draw_into(weights, problem.model, problem.noise, first, generator=problem.generator)
    found = _stated(weights)
    while weights.n < n and not (believable(found) and found.stderr <= problem.wanted):
        needed = 1.1 * weights.n * (found.stderr / problem.wanted) ** 2
        if needed > n and weights.n >= n // 8:
            break  # out of reach
        more = int(min(max(needed - weights.n, weights.n), n - weights.n))
        draw_into(weights, problem.model, problem.noise, more, generator=problem.generator)
        found = _stated(weights)
    against = problem.tails or problem.support
    rows = missed = 0
    if (own := problem.own) is not None:
        rows, missed = int((own > -math.inf).sum()), int((own > weights.largest).sum())
        against = against or _missed(missed / len(own), len(own), found.stderr, "no draw's weight is as large")
    share = weights.share_of_rarest()
    if against is None and share > max(TOLERATED * found.stderr, FAIR * RAREST / weights.n):
        against = f"the {RAREST} draws farthest out carry {share:.1%} of the weight: the model reaches beyond the noise"
    return _judged(found, problem.wanted, against)._replace(rows=rows, missed=missed), weights


def _stated(weights: Weights) -> LogZ:
    """Importance sampling's estimate; where the weights' variance may be infinite its error is taken as up to twice
    as large: draws that lack the largest weights look the better for it, and the ladder stops where they look good."""
    found = weights.log_z("importance")
    heavy = (found.khat - HEAVY) / (KHAT_LIMIT - HEAVY)
    return found._replace(stderr=found.stderr * (1 + heavy)) if 0 < heavy < 1 else found


def _by_grid(problem: _Problem, importance: LogZ) -> Rung:
    """Finer and finer, until two resolutions agree, with each other and with importance sampling if that counts."""
    points = problem.noise.sample(BOX_POINTS, generator=own_generator(problem.noise))
    known = [more.to(points) for more in (problem.data, problem.reach) if more is not None]
    with torch.no_grad():
        wide, box = fitting_boxes(problem.model, torch.cat([points, *known]), like=points)
    if known:  # coarse cells may overlook a mode, data do not
        box = bounding_box(torch.cat([box, *(more.to(box) for more in known)]), margin=0.0)
    size = box.shape[1]
    cells = CELLS[size] // (8 if size < 3 else 4)
    if not believable(importance):
        cells *= 2  # nobody to notice a mode between the cells
    while True:
        fine, *coarser = resolutions(problem.model, box, cells, like=points)
        found = summary(fine, *coarser)
        error = math.hypot(found.stderr, importance.stderr)
        apart = (found.value - importance.value) / max(error, 1e-12) if believable(importance) else 0.0
        # A fine grid may see a mode that no draw reached; less than the draws found it must not see.
        below = f"the grid misses mass: it is {-apart:.0f} errors below importance sampling"
        against = below if apart < -SIDES_APART else _between(problem, float(fine.log_p.max()), found.stderr)
        against = problem.tails or against
        rung = _judged(found, problem.wanted, against)
        agree = found.stderr < GRID_SHARE * problem.wanted and apart < SIDES_APART
        if cells >= CELLS[size] or (rung.enough and agree):
            return rung
        if mass_outside(fine) > LEAST_OUTSIDE:
            box = wide
        cells *= 2


def _between(problem: _Problem, densest: float, stderr: float) -> str | None:
    """Whether data lie where the model is denser than in any cell: in a mode between the cells."""
    if problem.data is None:
        return None
    with torch.no_grad():
        own = log_density(problem.model, problem.data)
    return _missed(unseen(own, densest + DENSER), len(own), stderr, "no cell of the grid is as dense")


def _by_chains(problem: _Problem, rungs: list[Rung], weights: Weights, evaluations: int) -> Climb:
    """The two dear rungs share the evaluations."""
    try:
        schedule = plan(problem.model, problem.noise, path=_way(problem), generator=problem.generator)
    except InvalidValue as refusal:
        return Climb(tuple(rungs), problem.wanted, (rungs[-1].why, f"annealed chains have no path ({refusal})"))
    schedule = _affordable(schedule, evaluations // 2)
    forward = _forward(problem, schedule, evaluations // 2)
    still = stuck(forward, problem.model, problem.noise, generator=problem.generator)
    narrow = _narrow(still, MOST_STUCK_ALONE if problem.data is None else MOST_STUCK)
    standing = [problem.tails, problem.support, narrow, _conflict(forward.log_z, rungs)]
    standing.append(_overlooked(problem, forward, weights))
    against = [found for found in standing if found is not None]
    rung = _judged(forward.log_z, problem.wanted, "; ".join(against) or _remembered(rungs))
    if rung.enough and problem.data is not None:
        rung = rung._replace(enough=False, why=f"{rung.why}, but the data are still to be asked")
    rungs = [*rungs, rung]
    if rung.enough:
        return Climb(tuple(rungs), problem.wanted, ())
    if (nowhere := _without_density(problem.own)) is not None:
        return Climb(tuple(rungs), problem.wanted, (rung.why, nowhere))
    settle = 0 if problem.data is None else SETTLE
    cost = forward.schedule.evaluations + settle * forward.schedule.samplers[-1].leapfrog_steps
    n_chains = max(FEWEST_CHAINS, min(evaluations // 2 // cost, len(forward.log_w)))
    try:
        found = bracket(
            problem.model,
            problem.noise,
            problem.data,
            n_chains=n_chains,
            forward=forward,
            settle=settle,
            generator=problem.generator,
            progress=problem.progress,
        )
    except InvalidValue as refusal:  # chains that ended where the model is not finite
        return Climb(tuple(rungs), problem.wanted, (rung.why, str(refusal)))
    rung, doubts = _weigh(found, problem.wanted)
    doubts = (*doubts, *against)
    # No row counts as missed: where no chain from the noise has come, the joined estimate has the rows' share of it.
    rows = found.upper.n if found.from_data else 0
    rung = rung._replace(sound=not doubts, enough=rung.enough and not doubts, rows=rows)
    return Climb((*rungs, rung), problem.wanted, doubts)


def _without_density(own: Tensor | None) -> str | None:
    """Whether rows lie where the model has no density, by their log-weights."""
    if own is None or bool((own > -math.inf).all()):
        return None
    zero = int((~(own > -math.inf)).sum())
    return f"the model has no density at {zero} of {len(own)} rows from the data: chains cannot start there"


def _way(problem: _Problem) -> str:
    """Images go over their bridges: on the geometric way their modes freeze out at once. Rows of a table need not."""
    return usual_path(problem.model, problem.noise) if len(event_of(problem.noise)) == IMAGE else "geometric"


def _conflict(found: LogZ, rungs: list[Rung]) -> str | None:
    """Where an earlier rung that can be believed says something else."""
    for other in (rung.log_z for rung in rungs if rung.sound):
        error = math.hypot(found.stderr, other.stderr)
        # A grid too coarse to tell how much may still have seen what no chain has.
        seen = other.method == "grid" and other.value - found.value > max(SIDES_APART * found.stderr, other.stderr / 2)
        if seen or abs(found.value - other.value) > SIDES_APART * error:
            return f"{found.method} and {other.method} are {abs(found.value - other.value):.2g} nats apart"
    return None


def _overlooked(problem: _Problem, forward: Annealing, weights: Weights) -> str | None:
    """Whether draws of the noise hold mass that is denser, beside the noise, than any place where a chain ended."""
    with torch.no_grad():
        reached = float(log_weight(problem.model, problem.noise, forward.x).double().max())
    share = weights.mass_above(reached, forward.log_z.value)
    if share < max(TOLERATED * forward.log_z.stderr, MOST_STUCK):
        return None
    return f"draws of the noise hold {min(share, 1.0):.1%} of the mass where no chain ended: {MISSES}"


def _narrow(share: float, most: float) -> str | None:
    """Whether chains stand still in more than a trifle of the mass."""
    if share < most:
        return None
    return f"in {share:.1%} of the mass the chains all but stand still: places as narrow may be missed"


def _remembered(rungs: list[Rung]) -> str | None:
    """What the data said against the noise itself."""
    return next((f"the data said: {rung.why}" for rung in rungs if MISSES in rung.why), None)


def _affordable(schedule: Schedule, evaluations: int) -> Schedule:
    """The schedule, with fewer temperatures where even the fewest chains could not pay for all of them."""
    share = evaluations / (FEWEST_CHAINS * schedule.evaluations)
    return schedule if share >= 1 else schedule.spread(max(1, int(share * len(schedule))))


def _forward(problem: _Problem, schedule: Schedule, evaluations: int) -> Annealing:
    """Annealed chains: some, then as many as the wanted error takes and the evaluations allow."""
    most = max(FEWEST_CHAINS, evaluations // schedule.evaluations)

    def more(n: int) -> Annealing:
        return ais(
            problem.model,
            problem.noise,
            n_chains=n,
            schedule=schedule,
            generator=problem.generator,
            progress=problem.progress,
        )

    run = more(min(FIRST_CHAINS, most))
    needed = 1.2 * len(run.log_w) * (run.log_z.stderr / problem.wanted) ** 2
    extra = int(min(needed, most)) - len(run.log_w)
    if run.log_z.stderr > problem.wanted and extra > 1:
        again = more(extra)
        log_w = torch.cat([run.log_w, again.log_w])
        run = run._replace(log_z=estimate(log_w, "ais"), log_w=log_w, x=torch.cat([run.x, again.x]))
    return run


def _weigh(found: Bracket, wanted: float) -> tuple[Rung, tuple[str, ...]]:
    """The joined estimate, and what the two sides have against it."""
    doubts = []
    if (problem := doubt(found.log_z)) is not None:
        doubts.append(problem)
    for name, side in (("from the noise", found.lower), ("from the model", found.upper)):
        apart = abs(side.value - found.log_z.value)
        error = math.hypot(side.stderr, found.log_z.stderr)
        if doubt(side) is None and apart > max(SIDES_APART * error, wanted):
            doubts.append(f"the chains {name} alone are {apart:.2g} nats, {apart / error:.0f} errors, away from it")
    if doubt(found.lower) is not None and (not found.from_data or doubt(found.upper) is not None):
        doubts.append(f"neither end can be believed alone ({doubt(found.lower)})")
    log_z = found.log_z
    if found.from_data and doubt(found.lower) is None:
        # Data are not quite the model's samples: where the noise's chains can be believed, they bound the error.
        log_z = log_z._replace(stderr=max(log_z.stderr, abs(log_z.value - found.lower.value) / 1.96))
    if not found.from_data:  # both ends rest on the same chains, which miss mass on the same side
        log_z = log_z._replace(stderr=math.hypot(log_z.stderr, log_z.value - found.lower.value))
    low, high = found.interval()
    why = f"between {nats(low)} and {nats(high)}" if math.isfinite(low + high) else "no two-sided bound"
    return Rung(log_z, not doubts, log_z.stderr <= wanted and not doubts, why), tuple(doubts)
