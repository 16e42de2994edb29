"""What every benchmark prints last: one JSON line per figure, and whether it met its goal."""

import json


def figure(metric: str, value: float, goal: float) -> bool:
    """Print a figure that should be at most its goal."""
    ok = value <= goal
    print(json.dumps({"metric": metric, "value": round(value, 4), "goal": goal, "ok": ok}))
    return ok
