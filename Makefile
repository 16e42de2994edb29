# The two commands of the README; both set up .venv first.
VENV := .venv
BIN := $(VENV)/bin
# One process for each core, one thread for each process: half the time of one process with all threads.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -q -n auto

.PHONY: demo test slow bench clean

demo: $(VENV)/ready
	$(BIN)/unnorm fit 8gaussians --noise gaussian --out runs/8gaussians --force

test: $(VENV)/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST)

slow: $(VENV)/ready
	$(PYTEST) -m slow

bench: $(VENV)/ready
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/quality.py
	$(BIN)/python benchmarks/efficiency.py
	$(BIN)/python benchmarks/ladder.py
	$(BIN)/python benchmarks/logz.py
	$(BIN)/python benchmarks/metrics.py
	$(BIN)/python benchmarks/images.py
	$(BIN)/python benchmarks/dimension.py
	$(BIN)/python benchmarks/replicas.py
	$(BIN)/python benchmarks/mnist.py  # needs UNNORM_DATA; peers.py needs '.[peers]', bridges_mnist.py a GPU

# torch first and alone: its exact pin finds the CPU build, which then satisfies everybody else.
$(VENV)/ready: pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) runs
