#!/usr/bin/env bash
# Measure the training scripts row by row, through their launchers:
#
#   bash bench/run.sh --preset smoke                   # two minutes on a CPU: does it all work here?
#   bash bench/run.sh --preset seed --out my-box/seed  # nine rows, pipeline and FSDP
#   bash bench/run.sh --engines fsdp,pp --micro 4,8 --ga 1,8 --ckpt false,true --dtype bf16
#   bash bench/run.sh --help
#
# Results go to bench/results/, one JSON a row; python -m bench.table turns them into tables.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ -z ${PYTHON:-} ]]; then
    bash "$ROOT/setup.sh"
    PYTHON=$ROOT/.venv/bin/python
fi
cd "$ROOT"
exec env PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" "$PYTHON" -m bench.run "$@"
