# Two commands do all set-up themselves:  make demo  and  make test.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Each of many processes would translate every file of ours again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test types types-darwin tests format bench figures docs corpus headline soak clean

demo: $(READY)
	$(BIN)/peerloom demo

test: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(MAKE) --no-print-directory -j2 types tests

# Side by side, for mypy takes a minute of one core.
types: $(READY)
	$(BIN)/mypy

# That nothing is taken for granted that macOS lacks. Half a minute, so not in every run of the tests.
types-darwin: $(READY)
	$(BIN)/mypy --platform darwin --no-warn-unreachable --cache-dir .mypy_cache/darwin \
		crypto dht gossip partition node sim

# One process more than there are cores: tests of real nodes wait for timers and for other processes a third of
# their time, and another test computes meanwhile.
tests: $(READY)
	$(BIN)/python -m pytest --numprocesses $$(($$(getconf _NPROCESSORS_ONLN) + 1)) --maxprocesses 4 --dist worksteal

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)
	@for file in $(filter-out benchmarks/headline.py benchmarks/cloudmesh.py,$(wildcard benchmarks/[a-z]*.py)); do $(BIN)/python $$file || exit 1; done

# The quick form of every benchmark, alone on the machine, beside the commit before: half an hour; writes
# docs/figures.md. With QUICK=1 those that matter most, in ten minutes.
figures: $(READY)
	$(BIN)/python benchmarks/_ledger.py $(if $(QUICK),--first)

# docs/ as a site that needs no network: docs-out/index.html. A warning is an error.
docs: $(READY)
	$(BIN)/pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs-out
	@echo "docs-out/index.html"

# Some hundred architectures of transformers and all families of torchvision, captured, proved, admitted, cut and
# trained: an hour; writes docs/corpus.md. With PEERLOOM_CORPUS=sample twenty-five of them.
# torchvision lies apart: where it is found beside a CPU build of torch, transformers cannot be imported.
corpus: $(READY)
	test -d $(VENV)/torchvision || $(BIN)/pip install --quiet --disable-pip-version-check --no-deps \
		--target $(VENV)/torchvision "$$(grep '^torchvision==' constraints.txt)"
	PYTHONPATH=$(VENV)/torchvision $(BIN)/python benchmarks/corpus.py

# One machine beside 2 and 4 providers over twenty seeds, in virtual time, and as real nodes: an hour or two; writes
# docs/headline.md. What is in headline-out/ is not made again. Then new partitions, a federated simulation in one
# machine, and a generated set of CIFAR's shape, an hour more: what is in cloudmesh-out/ is not made again.
headline: $(READY)
	$(BIN)/python benchmarks/headline.py
	$(BIN)/python benchmarks/cloudmesh.py

# The zoo at twenty cut sets a model, and Llama 3 8B: some minutes; writes docs/models.md. Then twenty-five models of
# others, five of them fine-tuned on two nodes. Then ten thousand
# hostile graphs, each refused or really run; a million events each of the step machines, the plan chain and
# whole runs (the last takes half an hour).
# Exactness for every shape and every death, and real processes killed one after another: some minutes each. At
# last a hundred seeds of two hundred peers that come and go, which takes an hour and more. All tests again, with
# what falls on one instant in three other orders, take half an hour.
soak: $(READY) types-darwin docs
	$(BIN)/python benchmarks/models.py
	PEERLOOM_CORPUS=sample $(BIN)/python -m pytest -s tests/test_corpus.py
	$(BIN)/python benchmarks/finetune.py
	PEERLOOM_SLOW=1 $(BIN)/python -m pytest -m slow
	PEERLOOM_HOSTILE_CASES=10000 $(BIN)/python -m pytest -s tests/partition/test_hostile_graphs.py
	PEERLOOM_PARTITION_SEEDS=50 $(BIN)/python -m pytest -s tests/test_partitions.py tests/sim/test_training.py \
		tests/sim/test_merging.py tests/sim/test_following.py
	PEERLOOM_SLOW=1 PEERLOOM_PARTITION_SEEDS=50 $(BIN)/python -m pytest -s tests/sim/test_alone.py
	PEERLOOM_EXACTNESS=full $(BIN)/python -m pytest -s tests/test_exactness.py
	PEERLOOM_EXAMPLES=300 $(BIN)/python -m pytest -s tests/partition/test_cut_random.py tests/partition/test_steps_hostile.py
	PEERLOOM_SWIM_EXAMPLES=300 $(BIN)/python -m pytest -s tests/gossip/test_machine.py
	PEERLOOM_COLUMN_SEEDS=200 $(BIN)/python -m pytest -s tests/node/local/test_column_seeds.py
	PEERLOOM_RECUT_STAGES=3 $(BIN)/python -m pytest -s tests/test_recut.py
	PEERLOOM_TURNS_PROCESSES=1 $(BIN)/python -m pytest -s tests/test_turns_processes.py
	PEERLOOM_LATE_MEMBERS=1 $(BIN)/python -m pytest -s tests/node/optimizer/test_liars.py \
		tests/node/optimizer/test_stalls.py
	PEERLOOM_PLAUSIBLE_SEEDS=10 $(BIN)/python -m pytest -s tests/node/optimizer/test_plausible_lies.py
	PEERLOOM_STARTS=40 $(BIN)/python -m pytest -s tests/node/optimizer/test_starts.py
	PEERLOOM_HELD=120 $(BIN)/python -m pytest -s tests/test_held_places_processes.py
	PEERLOOM_STACK=full $(BIN)/python -m pytest -s tests/sim/test_stack_world.py
	PEERLOOM_WALK_EVENTS=1000000 $(BIN)/python -m pytest -s tests/partition/test_agreement.py tests/partition/test_steps_walk.py
	PEERLOOM_RUN_WALK_EVENTS=1000000 $(BIN)/python -m pytest -s tests/sim/test_run_walk.py
	PEERLOOM_SMALL_SEEDS=200 $(BIN)/python -m pytest -s tests/sim/test_small_runs.py
	PEERLOOM_LOCAL_SEEDS=200 $(BIN)/python -m pytest -s tests/sim/test_local_runs.py
	PEERLOOM_REPLAYS=20 PEERLOOM_RECORD_CHANGES=2000 $(BIN)/python -m pytest -s tests/sim/replay
	PEERLOOM_KILLS=full $(BIN)/python -m pytest -s tests/test_kills.py tests/test_owner_back.py \
		tests/test_processes.py
	PEERLOOM_SERVING_KILLS=100 PEERLOOM_SERVING_SESSIONS=1000 PEERLOOM_SERVING_SEED=1 $(BIN)/python -m pytest -s \
		tests/test_serving_kills.py
	PEERLOOM_LEAVES=12 $(BIN)/python -m pytest -s tests/test_takeover.py -k loses_no_work
	PEERLOOM_LAB=full $(BIN)/python -m pytest -s tests/lab tests/node/test_portmap.py
	PEERLOOM_SWARM_PROCESSES=16 $(BIN)/python -m pytest -s tests/test_swarm_processes.py
	$(BIN)/python benchmarks/swim.py
	$(BIN)/python benchmarks/dht_churn.py
	$(BIN)/python benchmarks/survival.py
	$(BIN)/python benchmarks/small.py --full
	$(BIN)/python benchmarks/hostile.py --minutes 10
	$(BIN)/python benchmarks/hostile.py --member --minutes 10
	$(BIN)/python benchmarks/liars.py
	$(BIN)/python benchmarks/gossip_digits.py
	$(BIN)/python benchmarks/gossip_digits.py --columns
	PEERLOOM_PROCESSES=1 $(BIN)/python -m pytest -s tests/test_local_processes.py tests/test_links_processes.py \
		tests/test_cloudmesh.py tests/test_demo.py tests/test_hostile_member_processes.py \
		tests/node/test_calibration.py tests/node/test_blocked_datagrams.py tests/node/test_following_processes.py \
		tests/test_goals.py
	PEERLOOM_TURNS_SEEDS=50 $(BIN)/python -m pytest -s tests/node/test_turns.py
	PEERLOOM_TURNS_FIRST_SEED=100 PEERLOOM_TURNS_SEEDS=10 $(BIN)/python -m pytest -s tests/node/test_fair_bursts.py
	PEERLOOM_SUBMISSIONS=10 $(BIN)/python -m pytest -s tests/test_submissions.py
	PEERLOOM_STRESS_SECONDS=600 PEERLOOM_STRESS_PEERS=10 $(BIN)/python -m pytest -s tests/node/averaging/test_stress.py
	PEERLOOM_GRID_PEERS=27 PEERLOOM_GRID_GROUP=3 $(BIN)/python -m pytest -s tests/node/averaging/test_grid_of_nodes.py
	PEERLOOM_CATCH_UP_PARAMETERS=50000000 $(BIN)/python -m pytest -s tests/node/averaging/test_catch_up.py
	PEERLOOM_TUTORIALS=1 $(BIN)/python -m pytest -s tests/test_tutorials.py
	PEERLOOM_CONTAINER=1 $(BIN)/python -m pytest -s tests/test_container.py
	PEERLOOM_ROLLING=1 $(BIN)/python -m pytest -s tests/rolling
	PEERLOOM_INTERPRETERS=1 $(BIN)/python -m pytest -s tests/test_interpreters.py
	PEERLOOM_WHEEL=1 $(BIN)/python -m pytest -s tests/test_wheel.py
	PEERLOOM_SCRIPTS=3 $(BIN)/python -m pytest -s tests/test_pytorch_script.py
	PEERLOOM_CHURN_SECONDS=600 $(BIN)/python -m pytest -s tests/gossip/averaging/test_churn.py
	PEERLOOM_MEMBER_SEEDS=50 $(BIN)/python -m pytest -s tests/test_hostile_member.py tests/test_hostile_serving.py \
		tests/node/averaging/test_lying_donors.py
	for order in 2 3 4; do PEERLOOM_ORDER=$$order $(MAKE) --no-print-directory tests || exit 1; done
	$(BIN)/peerloom sim churn --seeds 100 --jobs 2 --out soak-out

clean:
	rm -rf $(VENV) build dist *.egg-info demo-out docs-out soak-out headline-out cloudmesh-out

# torch goes first and exactly pinned: it takes the CPU build, which later ranges then accept. pip would translate
# thirteen thousand files on one core; a few of them are for a newer Python, and fail.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Peerloom needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/pip install --no-compile --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,test]'
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
	touch $(READY)
