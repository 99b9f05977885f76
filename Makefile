.PHONY: check format lint types imports test test-all mutants bench

check: lint types imports test  ## everything that a change has to pass, without the slow parts

format:
	ruff check --fix --quiet .
	ruff format .

lint:
	ruff format --check .
	ruff check .

types:
	mypy

imports:
	lint-imports

test:
	OMP_NUM_THREADS=1 pytest -n auto --dist loadfile -m "not slow and not engines" --durations=5

test-all:  ## also kill -9, Ray, SuperLink and the recipes, one after another: about half an hour
	pytest --durations=15

ONLY =
COMPLETE =

mutants:  ## plant 89 faults and 100 operator mutants of the core, and see which the fast tests kill; ONLY=privacy, COMPLETE=1
	python -m tests.mutants --pattern "$(ONLY)" $(if $(COMPLETE),--complete)

WORKS = all,startup,population,aggregation
REPETITIONS = 5
MINUTES = 120
PLAYERS =

bench:  ## ours and the peers in turn, and docs/benchmarks.md from the results; see benchmarks/README.md
	python -m benchmarks --works $(WORKS) --players "$(PLAYERS)" --repetitions $(REPETITIONS) --minutes $(MINUTES)
	python -m benchmarks.docs
