"""What every benchmark prints last: one JSON line per figure, and whether it met its goal."""

import json
import math


def figure(metric: str, value: float, goal: float | None = None, *, at_least: bool = False) -> bool:
    """Print a figure that should be at most its goal, or at least; one without a goal only informs."""
    ok = goal is None or (value >= goal if at_least else value <= goal)
    shown = round(value, 4) if math.isfinite(value) else None
    print(json.dumps({"metric": metric, "value": shown, "goal": goal, "ok": ok}))
    return ok
