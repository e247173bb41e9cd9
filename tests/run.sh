#!/usr/bin/env bash
# Install what the tests need and run all of them, or those that arguments for pytest name:
# bash tests/run.sh tests/test_data.py -k packing -x
# ARCH=gfx908 bash tests/run.sh -k amd: our kernels compiled for that GPU of AMD's, on a CPU.
# PYTHON=... uses that interpreter as it is, instead of preparing .venv.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ -z ${PYTHON:-} ]]; then
    bash "$ROOT/setup.sh" --dev
    PYTHON=$ROOT/.venv/bin/python
fi
cd "$ROOT"
# Two files at a time, or one if they share GPUs (see tests/conftest.py).
exec "$PYTHON" -m pytest -n auto --dist loadfile --no-loadscope-reorder "$@"
