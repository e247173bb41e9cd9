#!/usr/bin/env bash
# Measure the training scripts through their launchers, one row after another:
#
#   bash bench/run.sh --preset smoke                   # two minutes on a CPU: does everything work?
#   bash bench/run.sh --preset seed --out my-box/seed  # nine settings, pipeline and FSDP: 18 rows
#   bash bench/run.sh --engines fsdp,pp --micro 4,8 --ga 1,8 --ckpt false,true --dtype bf16
#   bash bench/run.sh --help
#
# Results go to bench/results/, one file per preset and one line per row; python -m bench.table
# prints them as tables.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ -z ${PYTHON:-} ]]; then
    bash "$ROOT/setup.sh"
    PYTHON=$ROOT/.venv/bin/python
fi
cd "$ROOT"
exec env PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" "$PYTHON" -m bench.run "$@"
