.PHONY: check format lint types imports test test-all same-numbers mutants without without-each size bench pages site versions

check: lint types imports test  ## what a change has to pass before it is committed

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

size:  ## code lines of the core and of each capability; python -m benchmarks.size --edges: what keeps one from being deleted
	python -m benchmarks.size

test:  ## the fast selection
	pytest

test-all:  ## also what is marked slow: kill -9, Ray, SuperLink, several machines, the recipes
	pytest --complete --durations=15

BASE =
ONLY =
TOLERANCE = 0

same-numbers:  ## BASE=<commit>: do tests/same_numbers/configurations give the same bits there and here?
	python -m tests.same_numbers --base "$(BASE)" --only "$(or $(ONLY),*)" --tolerance "$(TOLERANCE)"

COMPLETE =

mutants:  ## plant the faults of faults.toml and 100 operator mutants of the core, and see which the fast tests kill; ONLY=privacy, COMPLETE=1
	python -m tests.mutants --pattern "$(ONLY)" $(if $(COMPLETE),--complete)

CAPABILITY =

without:  ## CAPABILITY=<name>, or several: delete it in a scratch clone, and run lint, types, contracts and the fast tests of the rest
	python -m tests.without $(CAPABILITY)

without-each: types  ## the same for every capability, from whose cache mypy starts; half an hour
	python -m tests.without --each

ALL_WORKLOADS = all,startup,population,aggregation
WORKLOADS = $(or $(WORKS),$(ALL_WORKLOADS))  # WORKS, PLAYERS: the former names
REPETITIONS = 5
MINUTES = 120
COMPETITORS = $(PLAYERS)

bench:  ## ours and the peers in turn, and docs/benchmarks.md from the results; see benchmarks/README.md
	python -m benchmarks --workloads $(strip $(WORKLOADS)) --competitors "$(COMPETITORS)" --repetitions $(REPETITIONS) --minutes $(MINUTES)
	python -m benchmarks.docs

pages:  ## docs/capabilities and the index of docs/README.md from the table of capabilities, and the page of ports and files
	python -m benchmarks.pages
	python -m benchmarks.openings

site:  ## the documentation as a site, in site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict --quiet

versions:  ## FedSign installed for every python3.N on the path, in environments of their own, and a short run
	python -m tests.versions
